"""FedSLS's tables and figures."""
