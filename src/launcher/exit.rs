//! Exit codes, as torchrun's; docs/reference/cli.md lists them for users.

use std::process::ExitCode;

/// All workers of all nodes succeeded.
pub(crate) const SUCCESS: ExitCode = ExitCode::SUCCESS;
/// Workers failed or were stopped, or the launcher could not run the job.
pub(crate) const FAILURE: ExitCode = ExitCode::FAILURE;
