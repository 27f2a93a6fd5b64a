"""`python -m backstay_operator`."""

from backstay_operator.main import main

main()
