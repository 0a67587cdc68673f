"""The pipeline that runs: a rank's lane of an order, with messages between the stages."""
