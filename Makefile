# Start with `make demo` and `make test`.
PY := .venv/bin/python
STAMP := .venv/.installed
RUNS := .venv/.runs

.PHONY: demo test lint types unit docs sweep storms all-storms fresh-storms mutants cluster slurm machines fabric-test clean

demo: $(RUNS)            ## train, kill two workers, recover, compare; about a minute on a laptop
	.venv/bin/everstep demo

test: lint               ## what must hold before anything lands
	$(MAKE) --no-print-directory -j 2 types unit

lint: $(STAMP)
	.venv/bin/ruff check src tests bench harness tools examples
	.venv/bin/ruff format --check -q src tests bench harness tools examples

types: $(STAMP)
	.venv/bin/mypy

unit: export PYTHONDONTWRITEBYTECODE :=  # tests start Python hundreds of times
unit: $(STAMP)
	$(PY) -m pytest -n 2 --dist worksteal

docs: $(STAMP)           ## the API reference, every picture and every quoted output, made again (minutes)
	$(PY) -m tools.docs

sweep: $(STAMP)          ## SIGKILL at every kind of moment, with real processes (minutes)
	$(PY) -m bench.sweep

cluster: $(STAMP)        ## coordinator, agents and workers as real processes, each of them killed
	$(PY) -m pytest tests --slow -m slow

STORMS := 2000
storms: $(STAMP)         ## tens of thousands of random failures in the simulator (about twenty minutes)
	$(PY) -m pytest tests/core/test_recovery_storms.py --storms $(STORMS)

all-storms: $(STAMP)     ## every kind of fault, by seed: one task's recovery, then the whole coordinator (minutes)
	.venv/bin/everstep sim storm --seeds 0:$(STORMS)
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --cluster
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --moves
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --sharded --cluster
	.venv/bin/everstep sim storm --seeds 0:$(STORMS) --groups

fresh-storms: $(STAMP)   ## storms that no run has seen; the seeds are printed (about a minute)
	.venv/bin/everstep sim storm --seeds fresh:500
	.venv/bin/everstep sim storm --seeds fresh:300 --cluster
	.venv/bin/everstep sim storm --seeds fresh:200 --moves
	.venv/bin/everstep sim storm --seeds fresh:200 --sharded
	.venv/bin/everstep sim storm --seeds fresh:100 --groups

mutants: $(STAMP)        ## bugs planted in recovery, agents and worker loops: seeds until each is seen (minutes)
	$(PY) bench/simulate.py mutants

slurm: $(STAMP)          ## a real Slurm cluster: nodes lost, drained, returned, a job requeued (about five minutes)
	if [ "$$(id -u)" = 0 ] && ! command -v slurmctld >/dev/null && command -v apt-get >/dev/null; then \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	  munge slurmctld slurmd slurm-client; } >/dev/null 2>&1 || echo "Slurm is not available"; fi
	$(PY) -m bench.slurm --skip

machines: $(STAMP)       ## faults of machines and networks, on machines made of namespaces (root; about fifteen minutes)
	$(PY) -m bench.machines --skip

fabric-test: $(STAMP)    ## a leaf-spine network of namespaces, made, used and removed (root; about three minutes)
	if [ "$$(id -u)" = 0 ] && ! command -v tc >/dev/null && command -v apt-get >/dev/null; then \
	  apt-get install -qq -y iproute2 >/dev/null; fi
	$(PY) -m bench.fabric test --skip

# What Everstep needs to run; `make test` adds the test tools. Python compiles modules when they are first used:
# compiling all of torch beforehand takes longer than the demo.
$(RUNS): pyproject.toml
	python3 -m venv .venv
	.venv/bin/pip install --quiet --no-compile --editable .
	touch $@

$(STAMP): $(RUNS)
	.venv/bin/pip install --quiet --editable '.[dev]'
	-$(PY) -m compileall -q -j 0 .venv/lib >/dev/null  # tests start Python hundreds of times
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
