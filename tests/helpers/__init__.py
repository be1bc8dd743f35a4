"""What tests share: ranks and other processes to run in, references to compare with, nets, servers, and pages that run."""
