"""`python -m backstay_sidecar`: one sidecar. `backstay agent` is the same."""

from backstay_sidecar.main import main

main()
