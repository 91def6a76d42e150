"""The load of an acceptance test (certify.sh, certify.sub): what each rank does, and what is recorded of it."""
