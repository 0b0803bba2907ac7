// What checks.py is for Python: `node PROGRAM FOLDER URL MODEL` prints one line of JSON with what came of each check.
// FOLDER is where npm installed the packages.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

export const [folder, url, model] = process.argv.slice(2);
export const UNKNOWN = "no-such-model";
export const QUESTION = "How is the weather in Paris?";
export const RESULT = "sunny, 21 degrees";
export const MAX_TOKENS = 300;
export const DESCRIPTION = "The weather in a city.";

const resolver = createRequire(pathToFileURL(`${folder}/package.json`));
export const load = (name) => import(pathToFileURL(resolver.resolve(name)));

export function checkThat(condition, found) {
  if (!condition) throw new Error(`found ${JSON.stringify(found)}`);
}

export async function expectError(kind, call, status = 404) {
  let given;
  try {
    given = await call();
  } catch (e) {
    if (!kind(e)) throw e;
    const found = e.status ?? e.statusCode;
    checkThat(found === status, `${e.name} with status ${found}`);
    return;
  }
  throw new Error(`no error, but ${JSON.stringify(given)}`);
}

export async function run(name, checks) {
  const { version } = JSON.parse(readFileSync(`${folder}/node_modules/${name}/package.json`, "utf8"));
  const results = {};
  for (const [check, make] of Object.entries(checks)) {
    try {
      await make();
      results[check] = null;
    } catch (e) {
      results[check] = `${e.name}: ${e.message}`.slice(0, 600);
    }
  }
  console.log(JSON.stringify({ client: `${name} ${version} (npm)`, checks: results }));
}
