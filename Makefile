# The few things that a developer runs. CI runs `make test` (see .ci/run).
#
# Needs Rust 1.95 or later; the tests also Python 3.11 and Node 20. What else they need is installed on first use.

CARGO   ?= cargo
# The real clients talk to the binary of this profile, the one that the Rust tests built already.
TARGET  := $(or $(CARGO_TARGET_DIR),target)
PROFILE := debug
RUN     := $(shell $(CARGO) nextest --version >/dev/null 2>&1 && echo nextest)

.PHONY: check test test-rust test-clients bench chaos deny fmt

## Formatting and lints, warnings are errors.
check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

## Everything: Rust, then real clients against the built binary.
test: test-rust test-clients

# Tests start the binaries; built first, no test waits for the compiler. With the tests, so that all of it is one
# set of features and nothing is compiled twice.
BUILD := $(CARGO) build --workspace --bins --tests --locked

test-rust:
	scripts/test-needs.sh redis-server
	$(BUILD)
ifeq ($(RUN),nextest)
	$(CARGO) nextest run --workspace --locked $(if $(CI),--profile ci)
else
	$(CARGO) test --workspace --locked --no-fail-fast
endif
	$(CARGO) test --workspace --locked --doc --quiet

test-clients:
	$(BUILD)
	RIALTO_BIN="$(abspath $(TARGET)/$(PROFILE)/rialto)" \
	SCRIPTED_AGENT_BIN="$(abspath $(TARGET)/$(PROFILE)/scripted_agent)" \
	tests/clients/run.sh

## What each operation costs here, beside a bare loop on the store and bare servers (needs a quiet machine).
bench:
	scripts/test-needs.sh redis-server
	$(CARGO) bench -p rialto-store --locked
	$(CARGO) run --release --locked -- bench $(BENCH)

## Everything that kills, freezes, cuts off and fills up, under traffic that keeps books. Without SECONDS the short
## form, which is part of `make test`; SECONDS=3600 goes on for an hour, and so does the model check. It prints seeds
## and ledgers; CHAOS_SEED repeats one.
SECONDS ?=
CHAOS   := $(CARGO) test -p rialto --locked --test chaos -- --test-threads 1 --nocapture
chaos:
	scripts/test-needs.sh redis-server
	$(BUILD)
ifeq ($(SECONDS),)
	$(CHAOS)
else
	MODEL_SEED=$(shell date +%s) MODEL_SCHEDULES=200000 $(CARGO) test -p rialto-task-store --locked --test model -- --nocapture
	CHAOS_SECONDS=$(SECONDS) $(CHAOS) --ignored
endif

## Licences, sources and banned crates of everything that we depend on.
deny:
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny check --hide-inclusion-graph bans licenses sources

fmt:
	$(CARGO) fmt --all
