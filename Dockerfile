# Two images, from one file, for linux/amd64:
#
#   docker build -t imagefleet-worker .
#   docker build -t imagefleet --target light .
#
# The worker has torch and, in torch's wheels, CUDA: the host needs only the NVIDIA driver and its
# container toolkit. `light` is the console (load, exporter, failed, deploy ...) without torch. Both
# run as user 65532 and write only to /cache and /tmp:
#
#   docker run --read-only --tmpfs /tmp --volume cache:/cache --gpus all imagefleet-worker
#
# Large layers that rarely change come first: a change of the code ships only the worker's last
# layer, 2 MB.
#
# Build arguments:
#   BASE_IMAGE   any Debian with Python 3.11, its venv and (for a GPU) its headers; pinned by digest,
#                as public repositories name it; no registry could be asked for it here. For a
#                newer one: docker buildx imagetools inspect python:3.11-slim
#   CUDA         12.8: torch 2.11 from PyTorch's index, for NVIDIA driver 525 or newer, RTX 20 to 50.
#                13: torch 2.13 from PyPI, for driver 580 or newer. none: torch for CPUs, a quarter
#                of the size.
#   PYTORCH_INDEX  of wheels for CUDA 12.8 and for CPUs: PyTorch's, or a copy of it.
#   MODEL        a path in the context, baked in at /models/checkpoint: a folder in diffusers format,
#                or one with a .safetensors file, named by MODEL_FILE. LoRAs are found in its
#                loras/. By default the demo model; to download a model at the start instead, set IMAGEFLEET_MODEL to an
#                https URL or to store:NAME.
#
# Every package has its hash in deploy/locks, written by deploy/locks/write.py: pip refuses another
# file, whichever index it came from. Debian's packages are as signed by Debian. What an image holds
# is in its /usr/share/imagefleet/sbom.json, in CycloneDX format.
#
# A worker compiles for its kind of GPU at the first start, and keeps the kernels in /cache. To have
# them in the image, run `imagefleet files make kernels` on a machine with each kind of GPU, which writes
# files into kernels/, and build on top:
#
#   FROM imagefleet-worker
#   COPY kernels/ /kernels/

ARG BASE_IMAGE=python:3.11-slim@sha256:db3ff2e1800a8581e2c48a27c3995339d47bdf046da21c7627accd3d51053a93

FROM ${BASE_IMAGE} AS base
RUN groupadd --gid 65532 imagefleet && \
    useradd --uid 65532 --gid 65532 --no-create-home --home-dir /cache \
      --shell /usr/sbin/nologin imagefleet && \
    install --directory --owner=65532 --group=65532 /cache && \
    python3 -m venv /opt/imagefleet
# Libraries cache files in HOME.
ENV PATH=/opt/imagefleet/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    HOME=/cache \
    HF_HUB_OFFLINE=1
WORKDIR /cache

# The lock file of one torch, so that its layer is rebuilt only when that changes.
FROM base AS pins
ARG CUDA=12.8
ARG PYTORCH_INDEX=https://download.pytorch.org/whl
WORKDIR /pins
COPY deploy/locks/torch-*.txt ./
RUN case "${CUDA}" in \
      12.8) index=cu128 ;; \
      13) index= ;; \
      none) index=cpu ;; \
      *) echo "CUDA=${CUDA} is unknown: use 12.8, 13 or none" >&2; exit 1 ;; \
    esac && \
    { if [ -n "${index}" ] && [ -n "${PYTORCH_INDEX}" ]; then \
        echo "--extra-index-url ${PYTORCH_INDEX}/${index}"; \
      fi; \
      cat "torch-${CUDA}.txt"; } > torch.txt

# The project without its dependencies.
FROM base AS project
WORKDIR /project
COPY deploy/locks/build.txt /pins/
RUN pip install --no-deps --require-hashes --requirement /pins/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY evaluation evaluation
COPY fleet fleet
COPY gateway gateway
COPY imagefleet imagefleet
COPY loadgen loadgen
COPY worker worker
# The demo's models stay out: a change of the code ships as a few hundred kilobytes.
RUN mkdir demo_model demo_cascade && \
    pip install --no-deps --no-build-isolation --prefix=/project/installed .

# What writes the SBOM, in an environment of its own.
FROM base AS sbom
RUN python3 -m venv --without-pip /opt/sbom
COPY deploy/locks/sbom.txt /pins/
RUN pip --python /opt/sbom/bin/python install --no-deps --require-hashes --requirement /pins/sbom.txt
COPY deploy/write_sbom.py /opt/sbom/

FROM base AS light-packages
COPY deploy/locks/light.txt /pins/
RUN pip install --no-deps --require-hashes --requirement /pins/light.txt && pip check

FROM light-packages AS light-sbom
COPY --from=project /project/installed /opt/imagefleet
COPY --from=sbom /opt/sbom /opt/sbom
RUN /opt/sbom/bin/python /opt/sbom/write_sbom.py imagefleet /usr/share/imagefleet

FROM light-packages AS light
COPY --from=light-sbom /usr/share/imagefleet /usr/share/imagefleet
COPY --from=project /project/installed /opt/imagefleet
ARG REVISION=unknown
LABEL org.opencontainers.image.title="imagefleet" \
      org.opencontainers.image.description="The console of a fleet of image workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
USER 65532:65532
STOPSIGNAL SIGTERM
ENTRYPOINT ["imagefleet"]
CMD ["--help"]

FROM base AS worker-packages
ARG CUDA=12.8
# Triton compiles its launchers in C at the first start on a GPU. Python's headers are in the base
# image, CUDA's in Triton's wheel.
# hadolint ignore=DL3008
RUN if [ "${CUDA}" != none ]; then \
      apt-get update && \
      apt-get install --yes --no-install-recommends gcc libc6-dev && \
      apt-get clean && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=pins /pins/torch.txt /pins/
RUN pip install --no-deps --require-hashes --requirement /pins/torch.txt
COPY deploy/check_torch.py /pins/
RUN python -B /pins/check_torch.py "${CUDA}"
COPY deploy/locks/worker.txt /pins/
RUN pip install --no-deps --require-hashes --requirement /pins/worker.txt && pip check
# After the check: spandrel asks for torchvision, without which it is imported here.
COPY deploy/locks/upscalers.txt /pins/
RUN pip install --no-deps --require-hashes --requirement /pins/upscalers.txt

FROM worker-packages AS worker-sbom
COPY --from=project /project/installed /opt/imagefleet
COPY --from=sbom /opt/sbom /opt/sbom
RUN /opt/sbom/bin/python /opt/sbom/write_sbom.py imagefleet-worker /usr/share/imagefleet

FROM worker-packages AS worker
ARG MODEL=demo_model
# Under its own name, which is recorded with each image; the link has a fixed path.
COPY ${MODEL} /models/${MODEL}
RUN ln --symbolic "/models/${MODEL}" /models/checkpoint
COPY --from=worker-sbom /usr/share/imagefleet /usr/share/imagefleet
COPY --from=project /project/installed /opt/imagefleet
ARG MODEL_FILE=""
ARG REVISION=unknown
LABEL org.opencontainers.image.title="imagefleet-worker" \
      org.opencontainers.image.description="A worker that turns a queue of prompt jobs into images" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
# The container toolkit reads the NVIDIA_ variables; utility is nvidia-smi. The folders of LoRAs and
# of kernels have precedence over the storage and need not exist.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    IMAGEFLEET_MODEL=/models/checkpoint${MODEL_FILE:+/$MODEL_FILE} \
    IMAGEFLEET_CACHE=/cache \
    IMAGEFLEET_LORA_DIRECTORY=/models/checkpoint/loras \
    IMAGEFLEET_KERNELS=/kernels \
    IMAGEFLEET_PORT=8080 \
    IMAGEFLEET_HOST=127.0.0.1
USER 65532:65532
STOPSIGNAL SIGTERM
# For Docker and compose; SaladCloud and Kubernetes have their own probes. The start may download
# and compile.
HEALTHCHECK --interval=30s --timeout=10s --start-period=15m --retries=3 \
  CMD ["imagefleet", "health", "live"]
ENTRYPOINT ["imagefleet"]
CMD ["worker"]
