"""What `serve` and `proxy` share: application, queue, audits, errors, log lines (extra `serve`)."""
