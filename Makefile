# Start with `make demo` and `make test`.
PY := .venv/bin/python
STAMP := .venv/.installed
RUNS := .venv/.runs
# Tests and benches start Python hundreds of times: what is compiled once is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint types unit docs plots figures sweep storms all-storms fresh mutants cluster scenes slurm machines fabric-test release clean

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
	$(PY) -m tools.second_look -n $(TESTERS) --dist worksteal

docs: $(STAMP)           ## the API reference, every picture and every quoted output, made again (minutes)
	$(PY) -m tools.docs

plots: $(STAMP)          ## the pictures of costs and recoveries, from the figures of bench/figures.json
	$(PY) -m tools.plots docs/plots

figures: $(STAMP)        ## those figures taken again, on a quiet machine, and the pictures (about half an hour)
	$(PY) -m tools.plots --measure

sweep: $(STAMP)          ## SIGKILL at every kind of moment, with real processes (minutes)
	$(PY) -m bench.sweep

BUDGET := 1800
cluster: $(STAMP)        ## coordinator, agents and workers as real processes, each of them killed (half an hour at most)
	$(PY) -m tools.second_look tests --slow -m slow --budget $(BUDGET)

scenes: $(STAMP)         ## of these, clusters: coordinators, agents and workers that die, leave, return (minutes)
	$(PY) -m tools.second_look tests/server tests/node tests/cli tests/harness --slow -m slow -n 2

STORMS := 2000
storms: $(STAMP)         ## tens of thousands of random failures in the simulator (about twenty minutes)
	$(PY) -m pytest tests/core/test_recovery_storms.py --storms $(STORMS)

all-storms: $(STAMP)     ## every kind of fault, by seed: one task's recovery, then the whole coordinator (minutes)
	.venv/bin/everstep sim storm --seeds 0:$(STORMS)
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --cluster
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --moves
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --sharded --cluster
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --groups
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --virtual
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --roles
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --crowded

fresh: $(STAMP)          ## storms and examples that no run has seen; what fails is printed with its seed (minutes)
	$(PY) -m pytest tests -m hypothesis --fresh
	.venv/bin/everstep sim storm --seeds fresh:500
	.venv/bin/everstep sim storm --seeds fresh:300 --cluster
	.venv/bin/everstep sim storm --seeds fresh:200 --moves
	.venv/bin/everstep sim storm --seeds fresh:200 --sharded
	.venv/bin/everstep sim storm --seeds fresh:100 --groups
	.venv/bin/everstep sim storm --seeds fresh:100 --virtual
	.venv/bin/everstep sim storm --seeds fresh:100 --roles
	.venv/bin/everstep sim storm --seeds fresh:100 --crowded
	$(PY) bench/fuzz.py --inputs 40000 --seed fresh

mutants: $(STAMP)        ## bugs planted in machines and in the code around them: each must be seen (minutes)
	$(PY) bench/simulate.py mutants
	$(PY) bench/shell_mutants.py

slurm: $(STAMP)          ## a real Slurm cluster: nodes lost, drained, returned, a job requeued (about five minutes)
	command -v slurmctld >/dev/null || .ci/install munge slurmctld slurmd slurm-client
	$(PY) -m bench.slurm --skip

machines: $(STAMP)       ## faults of machines and networks, on machines made of namespaces (root; about fifteen minutes)
	$(PY) -m bench.machines --skip

fabric-test: $(STAMP)    ## a leaf-spine network of namespaces, made, used and removed (root; about three minutes)
	command -v tc >/dev/null || .ci/install iproute2
	$(PY) -m bench.fabric test --skip

release: test sweep all-storms cluster fresh mutants slurm machines fabric-test  ## everything, on a quiet machine (hours)

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
