"""Where images come from: known data sets, folders, files, hubs."""
