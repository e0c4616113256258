# MegaTrain in a container: `docker build -t megatrain .`; docs/gpu.md has the commands.
#
# torch brings its own CUDA libraries, so the image needs only the driver of the host. Python and
# the versions of all packages are those that CI tests (requirements-dev.lock).
FROM python:3.11-slim-bookworm

# gcc builds the host kernel here, and Triton's launchers at run time (train.compile, liger).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The build of torch: CUDA, or --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://pypi.org/simple
COPY requirements-dev.lock /src/
WORKDIR /src
RUN grep -o '^[^ ]*==[^ ;]*' requirements-dev.lock > versions.txt \
    && pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' versions.txt)"

COPY LICENSE README.md pyproject.toml setup.py ./
COPY src src
RUN pip install --no-cache-dir --constraint versions.txt . \
    && rm -r build \
    && python -c "from megatrain.optim.native import NativeKernel; print(NativeKernel().description)"

# Any user may run it (docker run --user): home and cache are one folder that all can write.
RUN useradd --uid 1000 --home-dir /cache --no-create-home megatrain \
    && install --directory --mode=1777 /cache /work
ENV HOME=/cache USER=megatrain XDG_CACHE_HOME=/cache
USER 1000
WORKDIR /work
# /cache: models of the Hub, prepared rows, measurements. /work: configs, rows, and runs/.
VOLUME ["/cache", "/work"]
ENTRYPOINT ["megatrain"]
CMD ["--help"]
