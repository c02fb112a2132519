"""The laboratory proves, predicts, compares and draws the product, which never imports it."""
