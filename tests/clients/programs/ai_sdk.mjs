// Vercel's AI SDK with one of its providers: `node ai_sdk.mjs FOLDER URL MODEL PROVIDER`.
import { DESCRIPTION, MAX_TOKENS, QUESTION, RESULT, UNKNOWN, checkThat, expectError, load, model, run, url } from "./checks.mjs";

const { APICallError, generateText, stepCountIs, streamText, tool } = await load("ai");
const { z } = await load("zod");
const baseURL = `${url}/v1`;
const PROVIDERS = {
  "@ai-sdk/openai": async (name) => {
    const openai = (await load("@ai-sdk/openai")).createOpenAI({ baseURL, apiKey: "none" });
    return { responses: openai.responses, chat: openai.chat };
  },
  "@ai-sdk/openai-compatible": async () => {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    return { chat: createOpenAICompatible({ name: "lbproxy", baseURL, apiKey: "none", includeUsage: true }) };
  },
  "@ai-sdk/anthropic": async () => {
    const anthropic = (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL, apiKey: "none" });
    return { messages: anthropic };
  },
};
const provider = process.argv[5];

const weather = tool({
  description: DESCRIPTION,
  inputSchema: z.object({ city: z.enum(["Paris"]) }),
  strict: true,
  execute: async () => RESULT,
});

function checksOf(name, make) {
  const given = { model: make(model), prompt: QUESTION, maxOutputTokens: MAX_TOKENS, temperature: 0, maxRetries: 0 };
  return {
    [name]: async () => {
      const { text, usage } = await generateText(given);
      checkThat(text && usage.outputTokens > 0, { text, usage });
    },
    [`${name}, streamed`]: async () => {
      let failure;
      const result = streamText({ ...given, onError: ({ error }) => (failure = error) });
      let text = "";
      for await (const piece of result.textStream) text += piece;
      if (failure) throw failure;
      checkThat(text && text === (await generateText(given)).text, text);
      checkThat((await result.usage).outputTokens > 0, await result.usage);
    },
    [`${name}, tools`]: async () => {
      // A tool is demanded in the first step only: then the model is free to say something.
      const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
      const { steps, text } = await generateText({ ...given, tools: { weather }, stopWhen: stepCountIs(2), prepareStep });
      checkThat(steps.length === 2 && steps[0].toolResults[0]?.output === RESULT, steps[0].content);
      checkThat(text, steps[1].content);
    },
    [`${name}, error`]: () =>
      expectError(APICallError.isInstance, () => generateText({ ...given, model: make(UNKNOWN) })),
  };
}

const checks = {};
for (const [name, make] of Object.entries(await PROVIDERS[provider]())) Object.assign(checks, checksOf(name, make));
await run(provider, checks);
