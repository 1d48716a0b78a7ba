"""Private names of lightning, torch, torchrec and fbgemm: one file per upstream package, one function per name.

Each function has a contract test (tests/contracts/test_compat*.py), which fails when an upstream release changes what
is used here. Imports are inside of the functions where a file must load without torchrec. Every monkeypatch says what
upstream does, why that is wrong for us, and when the patch can go.
"""
