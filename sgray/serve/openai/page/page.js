// The live page: asks /overview once a second and shows it; talks to /v1/chat/completions. Whatever comes from the
// server is put in as text, never as markup. The key stays in this tab.
"use strict";

const PERIOD_MS = 1000;
const at = (id) => document.getElementById(id);
let model = null;
let before = null;
let talking = null;
let messages = [];

function headers() {
  const key = sessionStorage.getItem("sgray-key");
  return key ? { authorization: `Bearer ${key}` } : {};
}

function node(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function number(value) {
  return Math.round(value).toLocaleString("en");
}

function share(value) {
  return `${(100 * value).toFixed(0)} %`;
}

function fill(id, rows, empty) {
  const body = at(id).tBodies[0];
  body.replaceChildren(...rows.map((cells) => {
    const row = node("tr");
    for (const cell of cells) {
      const place = node("td");
      place.append(cell);
      row.append(place);
    }
    return row;
  }));
  if (!rows.length) {
    const place = node("td", empty, "none");
    place.colSpan = at(id).tHead.rows[0].cells.length;
    const row = node("tr");
    row.append(place);
    body.append(row);
  }
}

function bar(replica) {
  const whole = Math.max(1, replica.kv_total_tokens);
  const made = node("div", undefined, "bar");
  for (const [name, tokens] of [["used", replica.kv_used_tokens], ["kept", replica.kv_cached_tokens]]) {
    const part = node("div", undefined, name);
    part.style.width = `${(100 * tokens) / whole}%`;
    made.append(part);
  }
  made.title = `${number(replica.kv_used_tokens)} in use, ${number(replica.kv_cached_tokens)} cached, of ${number(whole)}`;
  return made;
}

function tree(prefixes, parent, depth) { // each with its depth, those that begin with another after it
  return prefixes.filter((prefix) => prefix.parent === parent)
    .flatMap((prefix) => [[prefix, depth], ...tree(prefixes, prefix.hash, depth + 1)]);
}

function branch(prefix, depth) {
  const made = node("code", prefix.hash);
  made.style.marginLeft = `${1.5 * depth}em`;
  return made;
}

function speed(name, now, tokens) {
  const last = before && before.tokens[name];
  return last === undefined || !before ? 0 : Math.max(0, (tokens - last) / Math.max(0.001, now - before.at));
}

function show(found) {
  const now = performance.now() / 1000;
  model = found.model;
  at("model").textContent = `${found.model} · ${found.policy} · ${found.version}`;
  const speeds = {};
  const tokens = {};
  for (const replica of found.replicas) {
    tokens[replica.name] = replica.generation_tokens;
    speeds[replica.name] = speed(replica.name, now, replica.generation_tokens);
  }
  before = { at: now, tokens };
  const sum = (of) => found.replicas.reduce((total, replica) => total + of(replica), 0);
  at("speed").textContent = number(sum((replica) => speeds[replica.name]));
  at("running").textContent = number(sum((replica) => replica.running));
  at("waiting").textContent = number(sum((replica) => replica.waiting));
  at("hits").textContent = share(found.hit_rate);
  fill("replicas", found.replicas.map((replica) => [
    replica.name, bar(replica), number(replica.running), number(replica.waiting), number(replica.waiting_tokens),
    share(replica.hit_rate), number(speeds[replica.name]),
  ]), "no replica is up");
  fill("prefixes", tree(found.prefixes, null, 0).map(([prefix, depth]) => [
    branch(prefix, depth), number(prefix.tokens), number(prefix.requests),
  ]), "no prompts have a page in common yet");
  fill("decisions", found.decisions.map((decision) => [
    new Date(1000 * decision.time).toLocaleTimeString(), decision.replica, number(decision.prompt_tokens),
    number(decision.predicted_cached_tokens),
    decision.cached_tokens === null ? "–" : number(decision.cached_tokens),
  ]), "no request yet");
}

function state(text, isBad) {
  if (at("state").textContent === text) return; // a screen reader says whatever is put in, also when it is the same
  at("state").textContent = text;
  at("state").className = isBad ? "bad" : "";
}

async function look() {
  try {
    const response = await fetch("overview", { headers: headers(), cache: "no-store" });
    at("key-form").hidden = response.status !== 401;
    if (response.ok) {
      show(await response.json());
      state("live", false);
    } else if (response.status === 401) {
      state("a key is needed", true);
    } else {
      state((await response.json()).error.message, true);
    }
  } catch (error) {
    state(`no answer: ${error.message}`, true);
  }
  setTimeout(look, document.hidden ? 5 * PERIOD_MS : PERIOD_MS);
}

function bubble(role, text) {
  const made = node("p", text, role);
  at("talk").append(made);
  at("talk").scrollTop = at("talk").scrollHeight;
  return made;
}

// The texts of an event stream, as they come. Raises the message of an error event.
async function* texts(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        yield (choice.delta.reasoning_content || "") + (choice.delta.content || "");
      }
    }
  }
}

// What got no answer is no part of the talk; nor is an answer to what was cleared away meanwhile.
async function say(text) {
  const talk = messages;
  const asked = { role: "user", content: text };
  bubble("user", text);
  const answer = bubble("assistant", "");
  talking = new AbortController();
  at("send").hidden = true;
  at("stop").hidden = false;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({ model, messages: [...talk, asked], stream: true }),
      signal: talking.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const piece of texts(response)) {
      answer.textContent += piece;
      at("talk").scrollTop = at("talk").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") bubble("failed", error.message);
  }
  if (answer.textContent) talk.push(asked, { role: "assistant", content: answer.textContent });
  else answer.remove();
  talking = null;
  at("send").hidden = false;
  at("stop").hidden = true;
}

at("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("say").value.trim();
  if (!text || talking || model === null) return;
  at("say").value = "";
  at("say").focus();
  say(text);
});
at("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("chat-form").requestSubmit();
  }
});
at("stop").addEventListener("click", () => {
  if (talking) talking.abort();
  at("say").focus(); // the button that had the focus goes
});
at("clear").addEventListener("click", () => {
  if (talking) talking.abort();
  messages = [];
  at("talk").replaceChildren();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("sgray-key", at("key").value.trim());
  at("key").value = "";
});
look();
