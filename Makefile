# Every target makes what it needs: `make test` on a machine with nothing but a Python 3.10+ and its venv module is enough.
PYTHON ?= python3
PY := .venv/bin/python

# One thread per process: the ranks share the cores.
export OMP_NUM_THREADS ?= 1

# Else each of the suite's hundred processes would compile our sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-torchrec test test-all fuzz lint bench bench-transformer bench-state bench-planner clean

demo: .venv/.installed
	$(PY) examples/dlrm/demo.py

# A script in TorchRec's style, of which two imports differ. TorchRec 1.8.0 calls what torch 2.13 deprecates, at length.
demo-torchrec: export PYTHONWARNINGS := ignore
demo-torchrec: .venv/.installed
	$(PY) -m torch.distributed.run --standalone --nproc_per_node 2 examples/torchrec_dlrm/dlrm_main.py \
		--adagrad --interaction_type dcn --dcn_low_rank_dim 16 --num_embeddings 20000 --embedding_dim 16 \
		--dense_arch_layer_sizes 64,16 --over_arch_layer_sizes 64,1 --batch_size 256 --limit_train_batches 300 \
		--lr_warmup_steps 30 --lr_decay_start 200 --lr_decay_steps 100 --print_sharding_plan

# Tests marked `gpu` run where there is a CUDA device (tests/conftest.py). A file stays in one process, and each process
# has ranks of its own: JOBS=0 runs all in one. Files begin in the order of tests/conftest.py, the longest first.
JOBS ?= 2
IN_FILES := -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: .venv/.installed
	$(PY) -m pytest tests -m "not slow" $(IN_FILES)

test-all: export FRESH_INTERPRETERS := 1
test-all: .venv/.installed .venv/.triton
	$(PY) -m pytest tests $(IN_FILES)
	TRITON_INTERPRET=1 $(PY) -m pytest tests/test_kernels.py tests/test_equality_kernels.py -m "not slow" \
		-k "triton or every_kernel" $(IN_FILES)

# Seeded probes of what strangers do, as a table of outcomes; another SEED draws others. ONLY=inputs runs one category.
SEED ?= 1
fuzz: .venv/.installed
	$(PY) -m tests.fuzz.run --seed $(SEED) $(if $(ONLY),--only $(ONLY)) $(if $(COUNT),--count $(COUNT))

lint: .venv/.installed
	$(PY) -m ruff check
	$(PY) -m mypy

# The allocator keeps what it freed, for both sides of a comparison alike: else glibc maps each large buffer anew and the
# page faults decide the ratio.
bench bench-transformer bench-state: export MALLOC_MMAP_THRESHOLD_ := 4294967296
bench bench-transformer bench-state: export MALLOC_TRIM_THRESHOLD_ := 4294967296
bench bench-transformer bench-state: export MALLOC_TOP_PAD_ := 268435456
bench: .venv/.installed
	$(PY) tests/bench/run.py $(BENCH)

bench-transformer: .venv/.installed
	$(PY) tests/bench/run.py transformer $(BENCH)

bench-state: .venv/.installed
	$(PY) tests/bench/run.py state $(BENCH)

# BENCH=--quick runs some of the cases.
bench-planner: .venv/.installed
	$(PY) tests/bench/planner.py $(BENCH)

# The stamp goes first and comes last: an interrupted install leaves none, and the next run starts from an empty
# environment. A finished one that is merely older than these files is brought up to date in place.
# TorchRec comes alone (--no-deps): it asks for the CUDA build of FBGEMM, 490 MB; setup.cfg has what it imports.
# Python compiles what is imported, once; pip would compile all of it (--no-compile), 40 seconds.
.venv/.installed: setup.cfg pyproject.toml Makefile
	test -f $@ || $(PYTHON) -m venv --clear .venv
	rm -f $@
	$(PY) -m pip install --quiet --no-compile torch==2.13.0
	$(PY) -m pip install --quiet --no-compile --editable '.[planner,torchrec,numba,safetensors,dev]'
	$(PY) -m pip install --quiet --no-compile --no-deps torchrec==1.8.0
	touch $@

# A GPU's build of torch brings it. Here it interprets what it would compile, and is 290 MB.
.venv/.triton: .venv/.installed
	$(PY) -m pip install --quiet --no-compile 'triton>=3.9'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
