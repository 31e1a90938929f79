// A `rialto dev` process, started the way a person starts it.

import { spawn } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), '../../..');
const PROFILES = ['debug', 'ci-release', 'release'];

function built(name) {
  const found = PROFILES.map((profile) => join(ROOT, 'target', profile, name)).filter(existsSync);
  if (found.length === 0) throw new Error(`no ${name}: build it first, or name it in the environment`);
  return found.sort((a, b) => statSync(b).mtimeMs - statSync(a).mtimeMs)[0];
}

const binary = process.env.RIALTO_BIN ?? built('rialto');

function scriptedAgent() {
  if (process.env.SCRIPTED_AGENT_BIN) return process.env.SCRIPTED_AGENT_BIN;
  const near = join(dirname(binary), 'scripted_agent');
  return existsSync(near) ? near : built('scripted_agent');
}

/**
 * Starts a server with the scripted agent at `/`; resolves with its URL and a way to end it. A cluster that is there
 * already (see ../README.md) has such an agent at `mount`.
 */
export async function start(mount = '') {
  const { url } = JSON.parse(process.env.RIALTO_TESTS_CLUSTER || '{}');
  if (url) return { url: url + mount, async stop() {} };
  const folder = mkdtempSync(join(tmpdir(), 'rialto-js-'));
  const config = join(folder, 'rialto.yaml');
  const backend = { type: 'command', command: [scriptedAgent()], persistent: true };
  writeFileSync(config, JSON.stringify({ agents: [{ id: 'scripted', mount: '/', backend }] })); // JSON is YAML
  const flags = ['--listen', '127.0.0.1:0', '--admin-listen', '127.0.0.1:0', '--config', config, '--ephemeral'];
  const child = spawn(binary, ['dev', ...flags], { stdio: ['ignore', 'pipe', 'pipe'] });
  let log = '';
  child.stderr.on('data', (data) => (log = (log + data).slice(-4000)));
  const line = await new Promise((ready, failed) => {
    createInterface({ input: child.stdout }).once('line', ready);
    child.once('exit', (code) => failed(new Error(`rialto ended with ${code}:\n${log}`)));
    setTimeout(() => failed(new Error(`rialto is not ready:\n${log}`)), 30_000).unref();
  });
  if (!line.startsWith('ready: http://')) throw new Error(`the first line of stdout is ${line}`);
  return {
    url: line.slice('ready: '.length).trim().replace(/\/$/, ''),
    async stop() {
      child.removeAllListeners('exit');
      const ended = new Promise((done) => child.once('exit', done));
      child.kill('SIGKILL');
      await ended;
      rmSync(folder, { recursive: true, force: true });
    },
  };
}
