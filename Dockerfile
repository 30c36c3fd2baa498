# The base brings Python and pip, no more. All that decides what a run computes comes with the pins in
# requirements.txt: torch's wheel for Linux carries its own CUDA and cuDNN, so the host gives the
# NVIDIA driver and nothing else. Another base with python3 (3.11 or later) serves as well:
#   docker build --build-arg BASE_IMAGE=... --build-arg GIT_COMMIT=$(git rev-parse HEAD) -t train .
ARG BASE_IMAGE=python:3.11.14-slim-bookworm
FROM ${BASE_IMAGE}

# torch.compile builds what it generates, with g++ on a CPU and gcc on a GPU (Triton's launcher), both
# against Python.h, which Debian's own Python lacks. procps: the tests look for processes.
RUN apt-get update \
    && headers=$(python3 -c "import sysconfig; print(sysconfig.get_path('include') + '/Python.h')") \
    && apt-get install -y --no-install-recommends g++ procps $(test -e "$headers" || echo python3-dev) \
    && rm -rf /var/lib/apt/lists/*

# Before the code: a change of the code installs nothing again.
COPY requirements.txt /train/
RUN python3 -m pip install --no-cache-dir -r /train/requirements.txt

# What a run reads and writes lies in two volumes, and belongs to a user who is not root. Caches of
# compiled code and fonts lie in /tmp, which every user may write (docker run --user=...).
RUN useradd --create-home --uid=1000 trainer && install -d -o trainer -g trainer /train/data /train/out
ENV TIKTOKEN_CACHE_DIR=/train/data/tiktoken_cache \
    TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor \
    TRITON_CACHE_DIR=/tmp/triton \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONDONTWRITEBYTECODE=1

COPY . /train/
# run.json names the commit, though there is no .git in here. Last: it changes with every commit.
ARG GIT_COMMIT=unknown
ENV GIT_COMMIT=${GIT_COMMIT}

WORKDIR /train
USER trainer
VOLUME ["/train/data", "/train/out"]
ENTRYPOINT ["python3", "train.py"]
