"""Private names of lightning, torch, torchrec and fbgemm: a file for each upstream package, a function for each name.

A contract test per function (tests/contracts/test_compat*.py) fails when an upstream release moves what is used here.
Imports are inside of the functions where a file must load without torchrec.
"""
