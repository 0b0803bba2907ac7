/*
 * A client that costs next to nothing, so that a benchmark of proxies sees the proxy.
 *
 *     load PORT BODY_FILE CONNECTIONS EVENTS WARM_S SECONDS
 *
 * CONNECTIONS keep-alive connections to 127.0.0.1:PORT, each of which posts the file's content as a chat completion,
 * reads the answer to its end and does it again, all in one thread. EVENTS above 0 says that answers are event streams
 * with so many events in front of [DONE]; then the connections open one by one over the first half of WARM_S.
 *
 * MARK in the body, if it is there, becomes the request's number, so that from there on no two prompts are alike. All
 * connections send from one buffer: a request that the kernel took in part may go on with a later one's number.
 *
 * What counts is what happens in the SECONDS after WARM_S. When they begin, the line "begin" is printed, when they have
 * passed, one line of JSON; so whoever reads both can look at the proxy's CPU at the same two moments, with the load
 * still running. It goes on for GO_ON_MS after that, lest closing connections be measured, and ends in the midst of
 * requests.
 *
 * A request is an error if its connection breaks, its status is not 200, its answer is not framed as it says, or its
 * stream has not all of its events and [DONE]. MAX_ERRORS errors end it with exit code 1. Times are in milliseconds,
 * each known to 3 %: "delay" is from when server.c sent an event (the event says so) to when it was read here, "ttft"
 * from a request to its first event, "gap" between two events of a stream.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_ERRORS = 100,
    GO_ON_MS = 50,
    READ = 1 << 18,
    READY = 1024,              /* events of one epoll_wait */
    DIGITS = 8,                /* of a request's number */
    STEPS = 32,                /* of a histogram, in each power of two: 3 % */
};

/* Counts by size: linear up to STEPS, from there on STEPS in each power of two. */
struct histogram {
    long total, counts[60 * STEPS];
};

/* A line that has come in part. What is longer than `data` is cut off. */
struct line {
    size_t size;
    char data[1024];
};

/* Where in the answer the next byte belongs; all but BODY and CHUNK are lines. */
enum place { STATUS, FIELDS, BODY, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER };

struct connection {
    int fd;
    int writing;               /* waits for EPOLLOUT */
    size_t sent;               /* of the request */
    enum place place;
    int chunked, closes;       /* what the head says */
    long left;                 /* bytes of the body or of the chunk */
    struct line framing, text; /* of HTTP; of the stream inside */
    long events;
    int done;                  /* [DONE] was seen */
    long long began_ns, event_ns;
};

static int epoll, port, measuring;
static long expected_events, errors, requests, events;
static const char MARK[] = "########"; /* as long as DIGITS */
static char *request, *mark;   /* mark: where the number stands; NULL: nowhere */
static size_t request_size;
static long long now;          /* CLOCK_MONOTONIC in ns, read before each group of ready connections and each read */
static struct histogram latency, ttft, delay, gap;

static void begin_request(struct connection *c);
static void open_connection(struct connection *c);

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static long long read_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return now = t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void count(struct histogram *h, long long value)
{
    if (!measuring || value < 0)
        return;
    int power = value < STEPS ? 0 : 63 - __builtin_clzll(value) - __builtin_ctz(STEPS);
    h->counts[power * STEPS + (value >> power)]++;
    h->total++;
}

/* The value below which `share` of all lie, in milliseconds; 0 if nothing was counted. */
static double quantile(const struct histogram *h, double share)
{
    long before = 0, wanted = h->total * share;
    for (int i = 0; i < 60 * STEPS; i++)
        if ((before += h->counts[i]) > wanted) {
            int power = i < 2 * STEPS ? 0 : i / STEPS - 1;
            return (double)((long long)(i - power * STEPS) << power) / 1e6;
        }
    return 0;
}

/* --- Answers ------------------------------------------------------------------------------------------------------ */

static void fail(struct connection *c, const char *why)
{
    if (++errors <= 3)
        fprintf(stderr, "load: %s\n", why);
    if (errors >= MAX_ERRORS) {
        fprintf(stderr, "load: %ld requests failed\n", errors);
        exit(1);
    }
    close(c->fd);
    open_connection(c);
    begin_request(c);
}

/* Moves bytes into the line up to its end. 1: the line is whole, without its end, and a zero byte behind it. */
static int take_line(struct line *line, const char **data, const char *end)
{
    const char *newline = memchr(*data, '\n', end - *data), *stop = newline ? newline : end;
    size_t size = stop - *data, room = sizeof line->data - 1 - line->size;
    memcpy(line->data + line->size, *data, size < room ? size : room);
    line->size += size < room ? size : room;
    *data = newline ? newline + 1 : end;
    if (newline) {
        if (line->size && line->data[line->size - 1] == '\r')
            line->size--;
        line->data[line->size] = 0;
        line->size = 0;
    }
    return newline != NULL;
}

static void see_event(struct connection *c, const char *text)
{
    const char *stamp = strstr(text, "t=");
    if (stamp)
        count(&delay, now - strtoll(stamp + 2, NULL, 10));
    if (c->events++)
        count(&gap, now - c->event_ns);
    else
        count(&ttft, now - c->began_ns);
    c->event_ns = now;
    events += measuring;
}

/* Looks at the payload, and moves on past it. */
static void see_payload(struct connection *c, const char **data, const char *end)
{
    if (!expected_events)
        *data = end;
    while (*data < end)
        if (take_line(&c->text, data, end)) {
            if (!strncmp(c->text.data, "data: {", 7))
                see_event(c, c->text.data);
            else if (!strcmp(c->text.data, "data: [DONE]"))
                c->done = 1;
        }
}

/* Reads a line of the answer's framing. -1: it is wrong; 1: it was the answer's last. */
static int see_framing(struct connection *c, const char *line)
{
    switch (c->place) {
    case STATUS:
        c->place = FIELDS;
        return strncmp(line, "HTTP/1.1 200", 12) ? -1 : 0;
    case FIELDS:
        if (!strncasecmp(line, "content-length:", 15))
            c->left = strtol(line + 15, NULL, 10);
        else if (!strncasecmp(line, "transfer-encoding: chunked", 26))
            c->chunked = 1;
        else if (!strncasecmp(line, "connection: close", 17))
            c->closes = 1;
        else if (!*line) {
            c->place = c->chunked ? CHUNK_SIZE : BODY;
            return c->chunked || c->left > 0 ? 0 : -1;
        }
        return 0;
    case CHUNK_SIZE:
        c->left = strtol(line, NULL, 16);
        c->place = c->left ? CHUNK : TRAILER;
        return c->left < 0 ? -1 : 0;
    case CHUNK_END:
        c->place = CHUNK_SIZE;
        return *line ? -1 : 0;
    default: /* TRAILER */
        return *line ? 0 : 1;
    }
}

/* Reads what has come. -1: the answer is wrong; 1: it has ended. */
static int see(struct connection *c, const char *data, const char *end)
{
    int is_over = 0;
    while (data < end && !is_over) {
        if (c->place != BODY && c->place != CHUNK) {
            if (take_line(&c->framing, &data, end))
                is_over = see_framing(c, c->framing.data);
            continue;
        }
        const char *start = data;
        see_payload(c, &data, end - data < c->left ? end : data + c->left);
        c->left -= data - start;
        if (!c->left && c->place == CHUNK)
            c->place = CHUNK_END;
        else
            is_over = !c->left;
    }
    return data < end ? -1 : is_over; /* nothing may follow: the next request has not been sent */
}

/* --- Requests ----------------------------------------------------------------------------------------------------- */

static void watch(struct connection *c, int operation)
{
    struct epoll_event e = {.events = EPOLLIN | (c->writing ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll, operation, c->fd, &e) < 0)
        die("epoll_ctl");
}

static void open_connection(struct connection *c)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address) < 0)
        die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    /* No port is left waiting for stray segments: with thousands of connections in each window they would run out. */
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->writing = 0;
    watch(c, EPOLL_CTL_ADD);
}

/* Sends as much of the request as the socket takes. A broken connection is seen when it is read. */
static void send_request(struct connection *c)
{
    ssize_t sent = send(c->fd, request + c->sent, request_size - c->sent, MSG_NOSIGNAL);
    if (sent > 0)
        c->sent += sent;
    int writing = c->sent < request_size;
    if (writing != c->writing) {
        c->writing = writing;
        watch(c, EPOLL_CTL_MOD);
    }
}

static void number_request(void)
{
    static unsigned long number;
    unsigned long rest = ++number;
    for (int i = DIGITS; mark && i--; rest /= 10)
        mark[i] = '0' + rest % 10;
}

static void begin_request(struct connection *c)
{
    number_request();
    c->sent = c->framing.size = c->text.size = 0;
    c->place = STATUS;
    c->chunked = c->closes = c->done = 0;
    c->left = c->events = 0;
    c->began_ns = read_clock();
    send_request(c);
}

static void receive(struct connection *c)
{
    static char data[READ];
    ssize_t got = recv(c->fd, data, sizeof data, 0);
    if (got < 0 && errno == EAGAIN)
        return;
    read_clock();
    int is_over = got > 0 ? see(c, data, data + got) : -1;
    if (is_over < 0) {
        fail(c, got > 0 ? c->place == FIELDS ? c->framing.data : "an answer is framed wrongly" : "a connection broke");
    } else if (is_over) {
        if (expected_events && (c->events != expected_events || !c->done)) {
            fail(c, "a stream has not all of its events");
            return;
        }
        count(&latency, now - c->began_ns);
        requests += measuring;
        if (c->closes) {
            close(c->fd);
            open_connection(c);
        }
        begin_request(c);
    }
}

/* --- The run ------------------------------------------------------------------------------------------------------ */

static void read_request(const char *path, const char *url_path)
{
    static char body[8 << 20];
    FILE *file = fopen(path, "rb");
    if (!file)
        die(path);
    size_t size = fread(body, 1, sizeof body, file);
    fclose(file);
    request = malloc(size + 256);
    if (!request)
        die("malloc");
    request_size = sprintf(request,
                           "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: load\r\n"
                           "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n", url_path, port, size);
    memcpy(request + request_size, body, size);
    request_size += size;
    mark = memmem(request, request_size, MARK, DIGITS);
}

static double cpu_s(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void print_times(const char *name, const struct histogram *h)
{
    printf(", \"%s_ms\": {\"p50\": %.4f, \"p99\": %.4f}", name, quantile(h, 0.5), quantile(h, 0.99));
}

static void print_result(double seconds, double cpu)
{
    printf("{\"seconds\": %.4f, \"cpu_s\": %.4f, \"requests\": %ld, \"errors\": %ld, \"events\": %ld", seconds, cpu, requests,
           errors, events);
    print_times("latency", &latency);
    print_times("ttft", &ttft);
    print_times("delay", &delay);
    print_times("gap", &gap);
    puts("}");
    fflush(stdout);
}

int main(int count, char **arguments)
{
    if (count != 7 && count != 8) {
        fprintf(stderr, "usage: load PORT BODY_FILE CONNECTIONS EVENTS WARM_S SECONDS [PATH]\n");
        return 2;
    }
    port = atoi(arguments[1]);
    read_request(arguments[2], count == 8 ? arguments[7] : "/v1/chat/completions");
    long connections = atol(arguments[3]), opened = 0;
    expected_events = atol(arguments[4]);
    long long warm = atof(arguments[5]) * 1e9, wanted = atof(arguments[6]) * 1e9, start = read_clock(), begun = 0;
    double cpu = 0;
    struct connection *all = calloc(connections, sizeof *all);
    struct epoll_event ready[READY];
    if (!all)
        die("calloc");
    epoll = epoll_create1(0);
    for (;;) {
        while (opened < connections && (!expected_events || now - start >= warm / 2 / connections * opened)) {
            open_connection(&all[opened]);
            begin_request(&all[opened++]);
        }
        int n = epoll_wait(epoll, ready, READY, 2);
        read_clock();
        if (!begun && now - start >= warm) {
            begun = now;
            measuring = 1;
            cpu = cpu_s();
            puts("begin");
            fflush(stdout);
        } else if (measuring && now - begun >= wanted) {
            measuring = 0;
            print_result((now - begun) / 1e9, cpu_s() - cpu);
        } else if (begun && now - begun >= wanted + GO_ON_MS * 1000000LL)
            return 0;
        for (int i = 0; i < n; i++) {
            struct connection *c = ready[i].data.ptr;
            if (ready[i].events & EPOLLOUT)
                send_request(c);
            if (ready[i].events & ~EPOLLOUT)
                receive(c);
        }
    }
}
