"""How a data set is dealt to clients."""
