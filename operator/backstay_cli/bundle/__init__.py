"""A support bundle: all that explains a job's trouble, in one file, without its secrets."""

from backstay_cli.bundle.archive import Bundle, Index, Limits
from backstay_cli.bundle.gather import gather
from backstay_cli.bundle.mask import Masker

__all__ = ["Bundle", "Index", "Limits", "Masker", "gather"]
