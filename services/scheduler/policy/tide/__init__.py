"""What the policy `tide` alone needs: its forecasts, its plans, and how it chooses among them."""
