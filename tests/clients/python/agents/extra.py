"""An agent in plain Python, one process for each turn: what the scripted agent has no command for."""

import json
import sys
import time


def say(**line) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    turn = json.loads(sys.stdin.readline())
    text = "".join(part.get("text", "") for part in turn["message"]["parts"])
    command, _, rest = text.partition(" ")
    if command == "artifact":
        # Created, extended, and, when asked, replaced.
        say(type="artifact", artifactId="a1", parts=[{"text": "Hello"}], metadata={"j": 1, "k": 1})
        say(type="artifact", artifactId="a1", append=True, parts=[{"text": " world"}], metadata={"k": 2})
        if rest == "replace":
            say(type="artifact", artifactId="a1", parts=[{"text": "new"}])
    elif command == "count":
        # A side effect in the outside world that does not look at its input.
        while True:
            with open(rest, "a") as counter:
                counter.write(f"{turn['attempt']}\n")
            time.sleep(0.1)
    elif command == "fail":
        say(type="failed", reason="\u00e9" * int(rest))
        return
    elif command == "reject":
        say(type="rejected", reason="not today")
        return
    elif command == "env":
        say(type="text", text=f"{turn['attempt']} {turn['idempotencyKey']}")
    say(type="end")


main()
