//! The root cause in a few lines, for schedulers that show a short text of an ended container. Pure.

use super::model::{Failure, Report};

/// Most bytes of the text. Kubernetes keeps 4 KiB of a container, and 12 KiB of all containers of a pod.
pub(super) const MAX_BYTES: usize = 3 << 10;
/// Most lines of the traceback, and of stderr.
const TRACEBACK_LINES: usize = 8;
const STDERR_LINES: usize = 6;

/// Formats the root cause of a report, or its message if no worker failed. The text depends only on what all
/// nodes know, so all of them write equal texts.
pub(super) fn message(report: &Report) -> String {
    let text = match (report.root(), &report.message) {
        (Some(root), _) => of_failure(root),
        (None, Some(message)) => message.clone(),
        (None, None) => "the job failed".to_owned(),
    };
    format!("{}\n", text.trim_end())
}

fn of_failure(root: &Failure) -> String {
    let mut cause = root.explanation.lines();
    let first = cause.next().map_or_else(|| root.describe(), str::to_owned);
    let mut text =
        format!("rank {} on node {} ({}): {}: {first}\n", root.rank, root.node, root.host, root.class);
    for line in cause {
        text += &format!("{line}\n");
    }
    if let Some(advice) = &root.advice {
        text += &format!("advice: {advice}\n");
    }
    let traceback: Vec<&str> = root.traceback.iter().flat_map(|text| text.lines()).collect();
    for line in &traceback[traceback.len().saturating_sub(TRACEBACK_LINES)..] {
        text += &format!("{line}\n");
    }
    if traceback.is_empty() {
        let tail = &root.stderr_tail;
        for line in &tail[tail.len().saturating_sub(STDERR_LINES)..] {
            text += &format!("{line}\n");
        }
    }
    text
}
