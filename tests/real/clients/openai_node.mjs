// OpenAI's SDK for Node.js against a server: what openai_python.py does, with the same keys in its line of JSON.
//
//     node openai_node.mjs FOLDER BASE_URL MODEL      FOLDER: where `npm install openai` ran
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, baseURL, model] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/package.json`));
const OpenAI = require("openai").default;
const { version } = require(`${folder}/node_modules/openai/package.json`);

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const prompt = "The sky is";
const messages = [{ role: "user", content: prompt }];
const same = { model, max_tokens: 24, temperature: 0 };
const streamed = { ...same, stream: true, stream_options: { include_usage: true } };

async function addedUp(stream) {
  const sum = { text: "", tokens: null, finish: null, chunks: 0 };
  for await (const chunk of stream) {
    sum.chunks += 1;
    for (const choice of chunk.choices ?? []) {
      sum.text += (choice.delta ? choice.delta.content : choice.text) ?? "";
      sum.finish = choice.finish_reason ?? sum.finish;
    }
    if (chunk.usage) sum.tokens = chunk.usage.completion_tokens;
  }
  return sum;
}

const chat = await client.chat.completions.create({ ...same, messages });
const chatStream = await addedUp(await client.chat.completions.create({ ...streamed, messages }));
const plain = await client.completions.create({ ...same, prompt });
const completionStream = await addedUp(await client.completions.create({ ...streamed, prompt }));
let error = "none";
try {
  await client.completions.create({ model: "no-such-model", prompt });
} catch (e) {
  if (!(e instanceof OpenAI.NotFoundError)) throw e;
  error = `${e.status} ${e.code}`;
}
const models = [];
for await (const one of client.models.list()) models.push(one.id);
console.log(
  JSON.stringify({
    client: `openai-node ${version}`,
    models,
    chat: { text: chat.choices[0].message.content, tokens: chat.usage.completion_tokens },
    chat_stream: chatStream,
    completion: { text: plain.choices[0].text, tokens: plain.usage.completion_tokens },
    completion_stream: completionStream,
    error,
  }),
);
