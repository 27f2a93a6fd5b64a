# Prepares the image's venv for a torch that is mounted at /opt/torch: after the venv's own packages
# on the path, and started by the usual command. Run by the Dockerfile where TORCH=none.
set -eu
venv=/app/venv
echo /opt/torch > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/node-torch.pth"
printf '#!/bin/sh\nexec python -m torch.distributed.run "$@"\n' > "$venv/bin/torchrun"
chmod 755 "$venv/bin/torchrun"
