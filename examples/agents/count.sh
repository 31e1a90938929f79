#!/bin/sh
# Counts the words of a message. One process per turn. Needs jq.
# Try it: rialto dev --config examples/agents/count.yaml
set -eu

# One line holds everything about the turn; do not wait for the end of stdin, it stays open.
IFS= read -r turn
text=$(printf '%s' "$turn" | jq -r '[.message.parts[].text // empty] | join("\n")')

say() { # say TYPE KEY VALUE
    jq -cn --arg type "$1" --arg key "$2" --arg value "$3" '{type: $type, ($key): $value}'
}

if [ -z "$text" ]; then
    say rejected reason "I count words, and there are none."
    exit
fi
say status text "counting"
say text text "$(printf '%s' "$text" | wc -w | tr -d ' ') words"
echo '{"type":"completed"}'
