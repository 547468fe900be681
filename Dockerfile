# specdec serve, from the wheels that make wheels puts into dist/. docs/server.md tells how to run it.
FROM python:3.13-slim

# A wheel for each package, or none: there is no compiler. Those of dist/ are given as files, since an index may have
# other packages of their names.
RUN --mount=type=bind,source=dist,target=/dist \
    pip install --no-cache-dir --only-binary :all: /dist/llama_cpp_python-*.whl "$(ls /dist/spec_local-*.whl)[serve]"

RUN useradd --uid 1000 --create-home specdec && install --directory --owner specdec /data
USER 1000

# Models and measurements stay in the volume; settings are given as SPECDEC_*.
ENV HF_HOME=/data/huggingface XDG_DATA_HOME=/data XDG_CACHE_HOME=/data/cache
VOLUME /data

# Only an address other than loopback can be published; the server needs SPECDEC_API_KEY then, and refuses without.
ENV SPECDEC_HOST=0.0.0.0
EXPOSE 8080

# It answers 503 while the model loads, and to anybody, without the key.
HEALTHCHECK --interval=60s --timeout=10s --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health')"]

ENTRYPOINT ["specdec"]
CMD ["serve"]
