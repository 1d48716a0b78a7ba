"""One recipe under several strategies and numbers of devices: run, measured, compared."""
