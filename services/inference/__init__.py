"""The inference: log-probabilities under the old and the reference policy."""
