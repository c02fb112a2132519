# Start with `make demo` and `make test`.
PY := .venv/bin/python
STAMP := .venv/.installed
RUNS := .venv/.runs
# Tests and benches start Python hundreds of times: what is compiled once is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint types unit docs sweep storms fresh mutants cluster scenes slurm machines fabric-test release clean

demo: $(RUNS)            ## train, kill two workers, recover, compare; about a minute on a laptop
	.venv/bin/everstep demo

test: lint               ## what must hold before anything lands
	$(MAKE) --no-print-directory -j 2 types unit

lint: $(STAMP)
	.venv/bin/ruff check src tests bench harness tools examples
	.venv/bin/ruff format --check -q src tests bench harness tools examples

types: $(STAMP)
	.venv/bin/mypy

# Many tests wait for processes that they start: one more than there are cores keeps the cores busy.
TESTERS := $(shell n=$$(( $$(nproc) + 1 )); echo $$(( n < 12 ? n : 12 )))
unit: $(STAMP)
	$(PY) -m pytest -n $(TESTERS) --dist worksteal

docs: $(STAMP)           ## the generated reference, every picture and every quoted output, made again (minutes)
	$(PY) -m tools.docs

sweep: $(STAMP)          ## SIGKILL at every kind of moment, with real processes (minutes)
	$(PY) -m bench.sweep

BUDGET := 1800
cluster: $(STAMP)        ## coordinator, agents and workers as real processes, each of them killed (half an hour at most)
	$(PY) -m pytest tests --slow -m slow --budget $(BUDGET)

scenes: $(STAMP)         ## of these, clusters whose parts die, leave and return, and held scripts (minutes)
	$(PY) -m pytest tests/server tests/node tests/cli tests/launch/test_held_scripts.py --slow -m slow -n 2

# Kinds of storms, with how many seeds of each: of every 100 that STORMS asks for.
KINDS := task:100 cluster:100 moves:100 sharded:50 sharded-cluster:50 groups:50 roles:50 crowded:50 deaf:50 \
  votes:20 flips:20 corruption:20 spikes:20 hangs:20 cuts:20 plans:20 agents:20 tasks:20
STORMS := 2000
storms: $(STAMP)         ## every kind of fault, by seed: one task's recovery, then the whole coordinator (minutes)
	$(PY) -m pytest tests/storms/test_recovery_storms.py --storms $$(( $(STORMS) / 10 ))
	for kind in $(KINDS); do $(PY) -m tests.storms --kind $${kind%:*} \
	  --seeds 0:$$(( $(STORMS) * $${kind#*:} / 100 )) || exit 1; done

fresh: $(STAMP)          ## storms and examples that no run has seen; what fails is printed with its seed (minutes)
	$(PY) -m pytest tests -m hypothesis --fresh
	for kind in $(KINDS); do $(PY) -m tests.storms --kind $${kind%:*} --seeds fresh:$$(( 5 * $${kind#*:} )) || exit 1; done
	$(PY) -m tests.attacks.fuzz --inputs 40000 --seed fresh

mutants: $(STAMP)        ## bugs planted in machines and in the code around them: each must be seen (minutes)
	$(PY) -m tests.storms.seek_mutants
	$(PY) -m tests.storms.shell_mutants

slurm: $(STAMP)          ## a real Slurm cluster: nodes lost, drained, returned, a job requeued (about five minutes)
	command -v slurmctld >/dev/null || .ci/install munge slurmctld slurmd slurm-client
	$(PY) -m bench.slurm --skip

machines: $(STAMP)       ## faults of machines and networks, on machines made of namespaces (root; about fifteen minutes)
	$(PY) -m bench.machines --skip

fabric-test: $(STAMP)    ## a leaf-spine network of namespaces, made, used and removed (root; about three minutes)
	command -v tc >/dev/null || .ci/install iproute2
	$(PY) -m tests.fabric.measured test --skip

release: test sweep storms cluster fresh mutants slurm machines fabric-test  ## everything, on a quiet machine (hours)

# What Everstep needs to run; `make test` adds the test tools. Python compiles modules when they are first used:
# compiling all of torch beforehand takes longer than the demo.
$(RUNS): pyproject.toml
	python3 -m venv .venv
	.venv/bin/pip install --quiet --no-compile --editable .
	touch $@

$(STAMP): $(RUNS)
	.venv/bin/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
