"""The inference: computes log-probabilities under the old and the reference policy."""
