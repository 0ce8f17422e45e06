"""An app for Flower's SuperLink whose rounds train nothing."""
