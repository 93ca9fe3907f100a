"""Wire formats, both ways: checked requests out of JSON, and JSON out of reports and outputs. No model, no I/O."""
