/*
 * A model server that costs next to nothing, so that a benchmark of proxies sees the proxy.
 *
 *     server PORT METRICS_FILE        PORT 0: any free one; prints "listening on PORT"
 *
 * It answers on keep-alive connections of 127.0.0.1, in one thread:
 *
 *     POST without "stream": true   one fixed JSON answer
 *     POST with "stream": true      "max_tokens" events, one each "seed" milliseconds, then [DONE]
 *                                   (both are fields of OpenAI's API, so that every router passes them on)
 *     GET /metrics                  the file's content
 *     GET /v1/models                one model, "m"
 *     GET, any other path           200 and {}: routers ask for /health and for facts about the server
 *
 * Every event carries the time at which it was sent, "t=<nanoseconds of CLOCK_MONOTONIC>", from which load.c on the
 * same machine tells how long it took. Events keep to the beat of their stream's first one, whatever happens between.
 *
 * Requests must have a Content-Length if they have a body: a chunked one ends the connection. It trusts its clients:
 * it is no server for anything else.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum {
    SLOTS = 1024,              /* of the timer wheel, a millisecond each: the longest beat */
    MAX_REQUEST = 8 << 20,     /* head and body */
    MAX_UNSENT = 1 << 20,      /* bytes of one connection that its client does not read; more ends it */
    READY = 1024,              /* events of one epoll_wait */
};

struct bytes {
    char *data;
    size_t used, room;
};

struct connection {
    int fd;
    int writing;               /* waits for EPOLLOUT */
    struct bytes in, out;      /* what has been read and not answered; what could not be sent yet */
    long events_left;          /* of the stream that is running; 0 = none */
    long beat_ms, due_ms;
    struct connection *next, **link; /* in its slot of the wheel; link = NULL: in none */
};

static int epoll;
static struct connection *wheel[SLOTS];
static long streams;           /* running */
static struct bytes json_answer, metrics_answer, models_answer, empty_answer;

static const char ANSWER[] =
    "{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,"
    "\"message\":{\"role\":\"assistant\",\"content\":\" a few words of an answer\"},\"finish_reason\":\"length\"}],"
    "\"usage\":{\"prompt_tokens\":250,\"completion_tokens\":6,\"total_tokens\":256}}";
static const char MODELS[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"bench\"}]}";
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
static const char EVENT[] =
    "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\","
    "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" t=%020lld \"},\"finish_reason\":null}]}\n\n";
static const char DONE[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void reserve(struct bytes *b, size_t more)
{
    if (b->room - b->used >= more)
        return;
    b->room = 2 * b->room + more;
    b->data = realloc(b->data, b->room);
    if (!b->data)
        die("realloc");
}

static void append(struct bytes *b, const void *data, size_t size)
{
    if (size) {
        reserve(b, size);
        memcpy(b->data + b->used, data, size);
        b->used += size;
    }
}

static long long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static struct bytes make_answer(const char *type, const char *body, size_t size)
{
    struct bytes b = {0};
    char head[256];
    int n = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", type, size);
    append(&b, head, n);
    append(&b, body, size);
    return b;
}

static struct bytes read_file(const char *path)
{
    struct bytes b = {0};
    FILE *file = fopen(path, "rb");
    if (!file)
        die(path);
    do
        reserve(&b, 1 << 16);
    while ((b.used += fread(b.data + b.used, 1, b.room - b.used, file)) == b.room);
    fclose(file);
    return b;
}

/* --- Connections and the wheel ----------------------------------------------------------------------------------- */

static void schedule(struct connection *c, long due_ms)
{
    struct connection **slot = &wheel[due_ms % SLOTS];
    c->due_ms = due_ms;
    c->next = *slot;
    c->link = slot;
    if (c->next)
        c->next->link = &c->next;
    *slot = c;
}

static void unschedule(struct connection *c)
{
    if (!c->link)
        return;
    *c->link = c->next;
    if (c->next)
        c->next->link = c->link;
    c->link = NULL;
}

static void end_stream(struct connection *c)
{
    unschedule(c);
    streams -= c->events_left > 0;
    c->events_left = 0;
}

static void watch(struct connection *c, int operation)
{
    struct epoll_event e = {.events = EPOLLIN | (c->writing ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll, operation, c->fd, &e) < 0)
        die("epoll_ctl");
}

static void open_connection(int fd)
{
    struct connection *c = calloc(1, sizeof *c);
    if (!c)
        die("calloc");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    /* The proxy's port is not left waiting for stray segments: after thousands of connections they would run out. */
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
    c->fd = fd;
    watch(c, EPOLL_CTL_ADD);
}

static void close_connection(struct connection *c)
{
    end_stream(c);
    close(c->fd);
    free(c->in.data);
    free(c->out.data);
    free(c);
}

/* Sends, or keeps what the socket does not take. -1: the connection is over (the caller closes it). */
static int transmit(struct connection *c, const char *data, size_t size)
{
    if (!c->writing) {
        ssize_t sent = send(c->fd, data, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN)
            return -1;
        if (sent == (ssize_t)size)
            return 0;
        size_t rest = sent > 0 ? sent : 0;
        data += rest;
        size -= rest;
        c->writing = 1;
        watch(c, EPOLL_CTL_MOD);
    }
    append(&c->out, data, size);
    return c->out.used > MAX_UNSENT ? -1 : 0;
}

static int send_unsent(struct connection *c)
{
    ssize_t sent = send(c->fd, c->out.data, c->out.used, MSG_NOSIGNAL);
    if (sent < 0)
        return errno == EAGAIN ? 0 : -1;
    c->out.used -= sent;
    memmove(c->out.data, c->out.data + sent, c->out.used);
    if (!c->out.used) {
        c->writing = 0;
        watch(c, EPOLL_CTL_MOD);
    }
    return 0;
}

/* --- Answers ------------------------------------------------------------------------------------------------------ */

/* The event of now, as one HTTP chunk behind `before`; behind the stream's last one also its end. */
static int send_event(struct connection *c, const char *before)
{
    char event[512], out[1024];
    int size = snprintf(event, sizeof event, EVENT, now_ns());
    c->events_left--;
    int n = snprintf(out, sizeof out, "%s%x\r\n%s\r\n%s", before, size, event, c->events_left ? "" : DONE);
    if (!c->events_left)
        streams--;
    return transmit(c, out, n);
}

/* What stands behind a name of the body; NULL: it has no such name. Reading on ends at the body's last brace. */
static const char *value_of(const struct bytes *body, const char *name)
{
    const char *found = memmem(body->data, body->used, name, strlen(name));
    if (!found)
        return NULL;
    found += strlen(name);
    return found + strspn(found, " ");
}

static int answer_post(struct connection *c, const struct bytes *body)
{
    const char *stream = value_of(body, "\"stream\":"), *events, *beat;
    if (!stream || *stream != 't')
        return transmit(c, json_answer.data, json_answer.used);
    events = value_of(body, "\"max_tokens\":");
    if (!events) /* some routers write the name that replaced it */
        events = value_of(body, "\"max_completion_tokens\":");
    beat = value_of(body, "\"seed\":");
    c->events_left = events ? strtol(events, NULL, 10) : 0;
    c->beat_ms = beat ? strtol(beat, NULL, 10) : 0;
    if (c->events_left < 1 || c->beat_ms < 1 || c->beat_ms >= SLOTS) {
        c->events_left = 0;
        return -1;
    }
    streams++;
    if (c->events_left > 1)
        schedule(c, now_ns() / 1000000 + c->beat_ms);
    return send_event(c, STREAM_HEAD);
}

static int answer_get(struct connection *c, const char *path)
{
    const struct bytes *answer = &empty_answer;
    if (!strncmp(path, "/metrics ", 9))
        answer = &metrics_answer;
    else if (!strncmp(path, "/v1/models ", 11))
        answer = &models_answer;
    return transmit(c, answer->data, answer->used);
}

/* The body's length by a head that ends with a zero byte; -1: it has none that we can read. */
static long content_length(const char *head)
{
    const char *field = strcasestr(head, "\ncontent-length:");
    if (strcasestr(head, "\ntransfer-encoding:"))
        return -1;
    return field ? strtol(field + 16, NULL, 10) : 0;
}

/* Answers the requests that have arrived whole; none while a stream is running. -1: the connection is over. */
static int answer_requests(struct connection *c)
{
    while (!c->events_left && c->in.used) {
        char *end = memmem(c->in.data, c->in.used, "\r\n\r\n", 4);
        if (!end)
            return c->in.used > MAX_REQUEST ? -1 : 0;
        end[2] = 0;
        long length = content_length(c->in.data);
        end[2] = '\r';
        size_t head = end + 4 - c->in.data;
        if (length < 0 || length > MAX_REQUEST)
            return -1;
        if (c->in.used < head + length) {
            reserve(&c->in, head + length - c->in.used); /* one read for the rest */
            return 0;
        }
        struct bytes body = {.data = c->in.data + head, .used = length};
        int is_get = !strncmp(c->in.data, "GET ", 4);
        if ((is_get ? answer_get(c, c->in.data + 4) : answer_post(c, &body)) < 0)
            return -1;
        c->in.used -= head + length;
        memmove(c->in.data, c->in.data + head + length, c->in.used);
    }
    return 0;
}

static int receive(struct connection *c)
{
    reserve(&c->in, 4096);
    ssize_t got = recv(c->fd, c->in.data + c->in.used, c->in.room - c->in.used, 0);
    if (got < 0)
        return errno == EAGAIN ? 0 : -1;
    c->in.used += got;
    return got ? answer_requests(c) : -1;
}

/* Sends the events that are due up to now. A late stream catches up: its beat does not shift. */
static void tick(long *last_ms)
{
    long now_ms = now_ns() / 1000000;
    for (; *last_ms < now_ms; ++*last_ms) {
        struct connection *c = wheel[(*last_ms + 1) % SLOTS], *next;
        for (; c; c = next) {
            next = c->next;
            if (c->due_ms > *last_ms + 1)
                continue;
            unschedule(c);
            if (c->events_left > 1)
                schedule(c, c->due_ms + c->beat_ms);
            if (send_event(c, "") < 0 || (!c->events_left && answer_requests(c) < 0))
                close_connection(c);
        }
    }
}

static int listen_on(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (bind(fd, (struct sockaddr *)&address, size) < 0 || listen(fd, 4096) < 0)
        die("listen");
    getsockname(fd, (struct sockaddr *)&address, &size);
    printf("listening on %d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

int main(int count, char **arguments)
{
    struct epoll_event ready[READY], accepting = {.events = EPOLLIN}; /* data.ptr NULL = the listener */
    if (count != 3) {
        fprintf(stderr, "usage: server PORT METRICS_FILE\n");
        return 2;
    }
    struct bytes page = read_file(arguments[2]);
    json_answer = make_answer("application/json", ANSWER, sizeof ANSWER - 1);
    models_answer = make_answer("application/json", MODELS, sizeof MODELS - 1);
    empty_answer = make_answer("application/json", "{}", 2);
    metrics_answer = make_answer("text/plain; version=0.0.4; charset=utf-8", page.data, page.used);
    epoll = epoll_create1(0);
    int listener = listen_on(atoi(arguments[1]));
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &accepting);
    for (long last_ms = now_ns() / 1000000;; tick(&last_ms)) {
        int n = epoll_wait(epoll, ready, READY, streams ? 1 : -1);
        for (int i = 0; i < n; i++) {
            struct connection *c = ready[i].data.ptr;
            if (!c) {
                int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (fd >= 0)
                    open_connection(fd);
            } else if ((ready[i].events & EPOLLOUT && send_unsent(c) < 0) ||
                       (ready[i].events & ~EPOLLOUT && receive(c) < 0))
                close_connection(c);
        }
    }
}
