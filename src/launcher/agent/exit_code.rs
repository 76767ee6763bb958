//! The exit codes of `--exit-codes=scheduler`, from which a scheduler can decide whether to start the job again.
//! Pure.

use super::state_machine::AgentOutcome;
use crate::cause::Class;
use crate::rendezvous::OutcomeKind;

/// The job ended from outside: a node was lost, or a signal stopped it. sysexits.h calls it EX_TEMPFAIL.
pub(super) const FROM_OUTSIDE: u8 = 75;
/// The job would fail in the same way again. sysexits.h calls it EX_CONFIG.
pub(crate) const WOULD_FAIL_AGAIN: u8 = 78;
const FAILED: u8 = 1;

/// Returns the exit code of a launcher. `job` is how the job ended on all nodes, if they agreed. `root` is the
/// class of the root cause. `draining` is true if a drain had begun: workers that it had to stop are a failure.
/// `no_progress` is true if the job failed alike as often as the user allows.
pub(super) fn for_scheduler(
    end: &AgentOutcome,
    job: Option<&OutcomeKind>,
    root: Option<Class>,
    draining: bool,
    no_progress: bool,
) -> u8 {
    match (end, job) {
        (AgentOutcome::Success, _) => 0,
        (_, Some(OutcomeKind::Lost | OutcomeKind::Partitioned { .. })) => FROM_OUTSIDE,
        (_, Some(OutcomeKind::Stopped { .. }))
        | (AgentOutcome::Stopped(_) | AgentOutcome::Interrupted(_), None)
            if !draining =>
        {
            FROM_OUTSIDE
        }
        _ if no_progress || root.is_some_and(would_fail_again) => WOULD_FAIL_AGAIN,
        _ => FAILED,
    }
}

/// Returns true if a failure of this class does not depend on chance, load or hardware.
fn would_fail_again(class: Class) -> bool {
    matches!(
        class,
        Class::ImportError
            | Class::UsageError
            | Class::MissingProgram
            | Class::MissingLibrary
            | Class::NotExecutable
            | Class::CpuBinding
    )
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;

    use super::*;

    #[test]
    fn code_says_whether_another_start_may_help() {
        let failed = AgentOutcome::Failed(Vec::new());
        let here = |root| for_scheduler(&failed, None, Some(root), false, false);
        assert_eq!(here(Class::ImportError), 78);
        assert_eq!(here(Class::MissingProgram), 78);
        assert_eq!((here(Class::Exception), here(Class::Killed)), (1, 1));
        assert_eq!(for_scheduler(&failed, None, Some(Class::Exception), false, true), 78, "no progress");
        let stopped = AgentOutcome::Stopped(Signal::SIGTERM);
        let draining = |end, job| for_scheduler(end, job, None, true, false);
        assert_eq!(for_scheduler(&stopped, None, None, false, false), 75);
        assert_eq!(draining(&stopped, None), 1, "late workers");
        assert_eq!(draining(&AgentOutcome::Aborted, Some(&OutcomeKind::Stopped { signal: 15 })), 1);
        assert_eq!(draining(&AgentOutcome::Aborted, Some(&OutcomeKind::Lost)), 75);
        let elsewhere = |kind| for_scheduler(&AgentOutcome::Aborted, Some(&kind), None, false, false);
        assert_eq!(elsewhere(OutcomeKind::Lost), 75);
        assert_eq!(elsewhere(OutcomeKind::Stopped { signal: 15 }), 75);
        assert_eq!(elsewhere(OutcomeKind::Error { text: "no folder".to_owned() }), 1);
        assert_eq!(
            for_scheduler(&AgentOutcome::Success, Some(&OutcomeKind::Succeeded), None, false, false),
            0
        );
    }
}
