// Ask specdec serve about an image with the npm packages openai and ai, as their own helpers send it:
// node client_images.mjs ADDRESS TEXT IMAGE. TEXT is the answer to `one two` and the image, as JSON; IMAGE a file.
import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText } from 'ai';

const [address, expected] = [process.argv[2], JSON.parse(process.argv[3])];
const image = new Uint8Array(await readFile(process.argv[4]));
const settings = { baseURL: `${address}/v1`, apiKey: 'none' };
const openai = createOpenAI(settings);
const models = [
  createOpenAICompatible({ name: 'specdec', ...settings })('vision'),
  openai.chat('vision'),
  openai.responses('vision'),
  createAnthropic(settings)('vision'),
];
for (const model of models) {
  for (const part of [{ type: 'image', image }, { type: 'file', data: image, mediaType: 'image/png' }]) {
    const messages = [{ role: 'user', content: [{ type: 'text', text: 'one two' }, part] }];
    const { text } = await generateText({ model, messages, maxOutputTokens: 12, temperature: 0 });
    assert.equal(text, expected);
  }
}
