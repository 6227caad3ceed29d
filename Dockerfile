# OSCAR from this source tree; needs only the Docker Hub images and the package registries.
#   docker build -t oscar .
#   docker run -p 8000:8000 -v oscar:/var/lib/oscar oscar serve --host 0.0.0.0 --allow-anonymous
# With an NVIDIA GPU: docker run --gpus all …  The driver comes from the host, NVRTC and cuBLASLt from PyPI.
FROM rust:1-slim-trixie AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ pkg-config && rm -rf /var/lib/apt/lists/*
WORKDIR /oscar
COPY . .
RUN cargo build --release --locked -p oscar-cli && strip target/release/oscar

FROM debian:trixie-slim AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /v && /v/bin/pip install --no-cache-dir "nvidia-cuda-nvrtc>=13.0,<13.1" "nvidia-cublas>=13.0,<13.1" \
    && mkdir /cuda && find /v -name 'libnvrtc*.so*' -o -name 'libcublasLt.so*' | xargs -I{} cp -P {} /cuda/

FROM debian:trixie-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl && rm -rf /var/lib/apt/lists/* \
    && useradd --system --home-dir /var/lib/oscar --create-home oscar
COPY --from=build /oscar/target/release/oscar /usr/local/bin/oscar
COPY --from=cuda /cuda /usr/local/lib/oscar-cuda
ENV OSCAR_NVRTC=/usr/local/lib/oscar-cuda OSCAR_CUBLASLT=/usr/local/lib/oscar-cuda \
    OSCAR_CACHE_DIR=/var/lib/oscar/cache HF_HOME=/var/lib/oscar/huggingface
USER oscar
VOLUME /var/lib/oscar
EXPOSE 8000
# 503 while the model loads and after the engine has failed; the start may take as long as a calibration.
HEALTHCHECK --start-period=15m CMD curl -fsS http://127.0.0.1:8000/health || exit 1
ENTRYPOINT ["oscar"]
CMD ["serve"]
