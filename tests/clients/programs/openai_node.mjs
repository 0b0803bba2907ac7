// OpenAI's SDK for Node.js: /v1/responses and /v1/chat/completions.
import { DESCRIPTION, MAX_TOKENS, QUESTION, RESULT, UNKNOWN, checkThat, expectError, load, model, run, url } from "./checks.mjs";

const { default: OpenAI } = await load("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const asked = { role: "user", content: QUESTION };
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris"] } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { name: "weather", description: DESCRIPTION, strict: true, parameters };
const ask = (more) =>
  client.responses.create({ model, input: QUESTION, max_output_tokens: MAX_TOKENS, temperature: 0, ...more });
const say = (more) =>
  client.chat.completions.create({ model, messages: [asked], max_tokens: MAX_TOKENS, temperature: 0, ...more });
const isNotFound = (e) => e instanceof OpenAI.NotFoundError;

await run("openai", {
  responses: async () => {
    const response = await ask();
    checkThat(response.output_text && response.usage.output_tokens > 0, response);
  },
  "responses, streamed": async () => {
    let text = "";
    let last;
    for await (const event of await ask({ stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event;
    }
    checkThat(last.type === "response.completed", last);
    checkThat(text && text === (await ask()).output_text, text);
  },
  "responses, tools": async () => {
    const tools = [{ type: "function", ...tool }];
    const first = await ask({ tools, tool_choice: "required" });
    const call = first.output.find((item) => item.type === "function_call");
    checkThat(JSON.parse(call.arguments).city === "Paris", call);
    const { call_id, name, arguments: given } = call;
    const turn = { type: "function_call", call_id, name, arguments: given };
    const result = { type: "function_call_output", call_id, output: RESULT };
    const second = await ask({ input: [asked, turn, result], tools, tool_choice: "none" });
    checkThat(second.output_text, second);
  },
  "responses, error": () => expectError(isNotFound, () => ask({ model: UNKNOWN })),
  chat: async () => {
    const response = await say();
    checkThat(response.choices[0].message.content && response.usage.completion_tokens > 0, response);
  },
  "chat, streamed": async () => {
    let text = "";
    for await (const chunk of await say({ stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
    checkThat(text && text === (await say()).choices[0].message.content, text);
  },
  "chat, tools": async () => {
    const tools = [{ type: "function", function: tool }];
    const { message } = (await say({ tools, tool_choice: "required" })).choices[0];
    const [call] = message.tool_calls;
    checkThat(JSON.parse(call.function.arguments).city === "Paris", call);
    const messages = [asked, message, { role: "tool", tool_call_id: call.id, content: RESULT }];
    const second = await say({ messages, tools, tool_choice: "none" });
    checkThat(second.choices[0].message.content, second);
  },
  "chat, error": () => expectError(isNotFound, () => say({ model: UNKNOWN })),
});
