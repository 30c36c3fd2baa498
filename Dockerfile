# The base provides only Python and pip. Every library is pinned by its hash in requirements.lock:
# torch's Linux wheel brings its own CUDA and cuDNN, so the host provides only the NVIDIA driver.
# Any other base with python3 (3.11 or later) works too; it takes requirements.txt, because the lock
# was made for Python 3.11 on x86-64:
#   docker build --build-arg BASE_IMAGE=... --build-arg GIT_COMMIT=$(git rev-parse HEAD) -t train .
ARG BASE_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
FROM ${BASE_IMAGE}

# torch.compile builds its code with g++ on a CPU and gcc on a GPU (Triton's launcher). Both need
# Python.h, which Debian's own Python lacks. procps is for the tests, which look for processes.
RUN apt-get update \
    && headers=$(python3 -c "import sysconfig; print(sysconfig.get_path('include') + '/Python.h')") \
    && apt-get install -y --no-install-recommends g++ procps $(test -e "$headers" || echo python3-dev) \
    && rm -rf /var/lib/apt/lists/*

# Before the code, so that a change of the code does not reinstall them.
COPY requirements.txt requirements.lock /train/
ARG BASE_IMAGE
RUN case "$BASE_IMAGE" in \
        python:3.11.*) libraries="--require-hashes -r /train/requirements.lock" ;; \
        *) libraries="-r /train/requirements.txt" ;; \
    esac \
    && python3 -m pip install --no-cache-dir $libraries

# A run reads and writes two volumes, which belong to a user other than root. The caches of compiled
# code and fonts are in /tmp, to which any user may write (docker run --user=...).
RUN useradd --create-home --uid=1000 trainer && install -d -o trainer -g trainer /train/data /train/out
ENV TIKTOKEN_CACHE_DIR=/train/data/tiktoken_cache \
    TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor \
    TRITON_CACHE_DIR=/tmp/triton \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONDONTWRITEBYTECODE=1

COPY . /train/
# For run.json, since the image has no .git. Last, because it changes with every commit.
ARG GIT_COMMIT=unknown
ENV GIT_COMMIT=${GIT_COMMIT}

WORKDIR /train
USER trainer
VOLUME ["/train/data", "/train/out"]
ENTRYPOINT ["python3", "train.py"]
