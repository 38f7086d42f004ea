"""PSE's tables and figures."""
