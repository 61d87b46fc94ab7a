"""The loop: collect, filter, submit, wait, record, report; validation between."""
