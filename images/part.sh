# Builds a wheel of what lies here and unpacks it into /app/site, compiled: a folder and a layer of its own.
# usage, in the Dockerfile: sh part.sh
set -eu
python=/app/venv/bin/python
/build/bin/python -m hatchling build -t wheel -d /dist
python -m pip --python $python install --no-compile --no-deps --target /app/site /dist/*.whl
$python -m compileall -q --invalidation-mode unchecked-hash /app/site
