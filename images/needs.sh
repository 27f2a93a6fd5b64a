# Installs what a part needs into /app/venv, compiled, and lets that look for the part in /app/site.
# usage, in the Dockerfile: sh needs.sh LIST
set -eu
python=/app/venv/bin/python
python -m pip --python $python install --no-cache-dir --no-compile -r "$1"
echo /app/site > "$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/site.pth"
$python -m compileall -q -j 0 --invalidation-mode unchecked-hash /app/venv
