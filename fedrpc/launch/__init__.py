"""Local runs: one server and N client processes on this machine, and what people see of them."""
