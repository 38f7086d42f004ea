"""FedXDS's tables and figures."""
