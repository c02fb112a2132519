// Calls the coordinator with the token, and keeps one live connection that reconnects by itself.
//
// A WebSocket cannot carry the token, so each connection starts with a ticket: posted for with the token, good
// for one line within seconds, handed over as a subprotocol and so in no URL.

const KEY = "everstep-token";
const FIRST_WAIT_MS = 300;
const LONGEST_WAIT_MS = 4000;
const QUIET_MS = 15000; // a line that says nothing for so long is asked whether it is there

let asking = null;

// The address of a page can end in #token=...: a browser sends that part to no server, and this removes it from
// the address, and so from the history, at once.
const given = /^#token=([^\s#&]+)$/.exec(location.hash);
if (given) {
  sessionStorage.setItem(KEY, given[1]);
  history.replaceState(null, "", location.pathname);
}

function askForToken(sentence) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("ask-token");
    const field = document.getElementById("token");
    document.getElementById("token-wrong").textContent = sentence;
    const given = (event) => {
      event.preventDefault();
      document.getElementById("token-form").removeEventListener("submit", given);
      sessionStorage.setItem(KEY, field.value.trim());
      field.value = "";
      dialog.close();
      asking = null;
      resolve();
    };
    document.getElementById("token-form").addEventListener("submit", given);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asking;
}

export async function call(method, path, body) {
  for (;;) {
    const token = sessionStorage.getItem(KEY);
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
    if (answer.status === 401) {
      const later = sessionStorage.getItem(KEY) !== token; // another call has asked meanwhile
      if (!later) await askForToken(token ? "Wrong token." : "");
      continue;
    }
    const text = await answer.text();
    let row = null;
    try { row = JSON.parse(text); } catch { /* a refusal in plain words */ }
    if (!answer.ok) throw new Error(row?.error ?? (text || `status ${answer.status}`));
    return row;
  }
}

export class Link {
  constructor(hear, changed) {
    this.hear = hear; // gets every message
    this.changed = changed; // gets "live" or "away", and the reason
    this.wait = FIRST_WAIT_MS;
  }

  async open() {
    try {
      if (!sessionStorage.getItem(KEY) && (await call("GET", "/v1/health")).needs_token) await askForToken("");
      const { ticket } = await call("POST", "/v1/tickets");
      const scheme = location.protocol === "https:" ? "wss:" : "ws:";
      const line = new WebSocket(`${scheme}//${location.host}/v1/watch?as=page`, ["everstep", `ticket.${ticket}`]);
      let heard = Date.now();
      const watch = setInterval(async () => {
        if (Date.now() - heard < QUIET_MS) return;
        try { await call("GET", "/v1/health"); heard = Date.now(); } catch { line.close(); }
      }, QUIET_MS / 3);
      line.onmessage = (message) => {
        heard = Date.now();
        this.wait = FIRST_WAIT_MS;
        this.changed("live", "");
        this.hear(JSON.parse(message.data));
      };
      line.onclose = () => { clearInterval(watch); this.again("the line is closed"); };
    } catch (error) {
      this.again(error instanceof TypeError ? "the coordinator does not answer" : error.message);
    }
  }

  again(because) {
    this.changed("away", because);
    setTimeout(() => this.open(), this.wait * (0.75 + Math.random() / 2)); // not all pages at once
    this.wait = Math.min(LONGEST_WAIT_MS, this.wait * 2);
  }
}
