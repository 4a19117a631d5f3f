# One image for everything: the Prefect server, workers, flow runs, and `penstock` itself.
#   docker build -t penstock:cpu .
#   docker build -t penstock:cuda --build-arg TORCH=cuda .
# FLASH_ATTN is the address of a wheel of flash-attn for this Python and PyTorch, where there is one.
# A tag of the image python, of Python 3.11 to 3.14.
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH=cpu
ARG FLASH_ATTN=
ARG EXTRAS=azure,fast,gcs,kubernetes,s3,server
ENV PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/penstock/bin:$PATH
WORKDIR /usr/src/penstock
RUN python -m venv /opt/penstock
COPY constraints.txt pins.txt
# Torch built for CUDA brings CUDA itself; the pinned Triton is the one that it was built with.
RUN --mount=type=cache,target=/var/cache/pip \
    case "$TORCH" in \
        cpu) pip install -c pins.txt --extra-index-url https://download.pytorch.org/whl/cpu torch ;; \
        cuda) pip install -c pins.txt torch ;; \
        *) echo "TORCH is $TORCH; it is either cpu or cuda." >&2; exit 2 ;; \
    esac
COPY pyproject.toml README.md LICENSE ./
# The recipes that the package holds are a link to examples there.
COPY configs configs
COPY flows flows
COPY kernels kernels
COPY stages stages
COPY prefect.yaml prefect.yaml
RUN --mount=type=cache,target=/var/cache/pip \
    pip install -c pins.txt ".[$EXTRAS]" \
    && if [ -n "$FLASH_ATTN" ]; then pip install --no-deps "$FLASH_ATTN"; fi \
    && pip check

FROM python:${PYTHON}
# Triton and torch.compile call a compiler when training starts.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /var/lib/penstock --create-home penstock \
    && install --directory --owner penstock --group penstock /data
COPY --from=build /opt/penstock /opt/penstock
COPY prefect.yaml deploy/setup.sh deploy/worker.py deploy/job_variables.py /usr/share/penstock/
COPY flows /usr/share/penstock/flows
COPY configs /usr/share/penstock/configs
ENV PATH=/opt/penstock/bin:$PATH \
    PENSTOCK_HOME=/data \
    PENSTOCK_CACHE_HOME=/data/cache/penstock \
    HF_HOME=/data/cache/huggingface \
    DO_NOT_TRACK=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_CLIENT_MAX_RETRIES=20 \
    PREFECT_CLIENT_RETRY_EXTRA_CODES=500
USER 10001:10001
WORKDIR /data
CMD ["penstock", "--help"]
