//! The terminations of programs other than dropping all handles. In those with errors, one rank does
//! something unexpected, and all ranks must report one cause.

use crate::{CommError, Group, LossReason, ReduceOp, op};

use super::calls::HandleSink;
use super::handles::{MAX_WAIT, PendingHandles, TestError};
use super::random_program::{Fault, FaultCase};
use convoke_testkit::Random;

/// The reason of an abort.
const REASON: &str = "the program wants it";
/// A tag without any messages.
const UNUSED_TAG: u32 = u32::MAX;

/// Destroys all groups; subgroups must stay usable after their parents.
pub(crate) fn destroy_all(groups: &[Option<Group>]) -> Result<(), TestError> {
    for group in groups.iter().flatten() {
        group.barrier()?;
        destroy(group)?;
    }
    Ok(())
}

fn destroy(group: &Group) -> Result<(), TestError> {
    let other_handle = group.clone();
    group.destroy();
    match other_handle.barrier() {
        Err(CommError::Destroyed { .. }) => Ok(()),
        other => Err(format!("a call in a destroyed group became {other:?}").into()),
    }
}

/// Ends this rank's part in a group in which one rank causes a fault. Returns the cause that this rank gets.
pub(crate) fn terminate_with_fault(
    groups: &mut Vec<Option<Group>>,
    case: FaultCase,
    mut random: Random,
) -> Result<Option<String>, TestError> {
    let FaultCase { group, culprit, fault, shrinks } = case;
    let Some(group) = groups[group].take() else { return Ok(None) };
    let is_culprit = group.rank() == culprit;
    // A rank that returns knows that all others have come to this point. It may hear of the end here already.
    let mut reached = group.barrier();
    if is_culprit && fault == Fault::Leave {
        groups.clear();
        return Ok(None);
    }
    if is_culprit && fault == Fault::Destroy {
        return destroy(&group).map(|()| None);
    }
    let mut waiting = PendingHandles::new(random.next());
    if reached.is_ok() && !(is_culprit && fault == Fault::Abort) {
        reached = begin(&group, culprit, &mut waiting, &mut random);
    }
    let mut result = reached;
    if result.is_ok() {
        match fault {
            Fault::Abort if is_culprit => group.abort(REASON),
            Fault::MismatchedCall if is_culprit => result = other(&group, &mut random),
            Fault::Abort | Fault::MismatchedCall | Fault::Leave | Fault::Destroy => {
                result = expected(&group, &mut random)
            }
        }
    }
    // A rank that is done before it could notice, such as a root, hears of it in its next call.
    while result.is_ok() {
        result = group.barrier();
    }
    let mut errors = waiting.expect_failures()?;
    errors.extend(result.err());
    errors.extend(group.barrier().err());
    let causes: Vec<String> =
        errors.iter().map(|error| cause(error, culprit, fault)).collect::<Result<_, _>>()?;
    if shrinks {
        shrink(&group, culprit, fault)?;
    }
    match causes.iter().find(|cause| **cause != causes[0]) {
        Some(other) => Err(format!("two causes on one rank: {}; {other}", causes[0]).into()),
        None => Ok(causes.into_iter().next()),
    }
}

/// Begins operations that must fail.
fn begin(
    group: &Group,
    culprit: usize,
    waiting: &mut PendingHandles,
    random: &mut Random,
) -> Result<(), CommError> {
    for from in (0..group.size()).filter(|&rank| rank != group.rank()) {
        if from == culprit || random.below(2) == 0 {
            waiting.add_handle(
                group.start(op::recv(vec![0_u8; random.below(100)], from).tag(UNUSED_TAG))?,
                Box::new(|_| Ok(())),
            );
        }
    }
    if random.below(2) == 0 {
        waiting.add_handle(group.start(op::recv_any(vec![0_i64; 3]).tag(UNUSED_TAG))?, Box::new(|_| Ok(())));
    }
    Ok(())
}

/// Continues with the remaining ranks.
fn shrink(group: &Group, culprit: usize, fault: Fault) -> Result<(), TestError> {
    let left: Vec<usize> = (0..group.size()).filter(|&rank| rank != culprit || !fault.is_leave()).collect();
    let shrunk = group.shrink(MAX_WAIT)?;
    let global: Vec<usize> = left.iter().filter_map(|&rank| group.global_rank(rank)).collect();
    let ranks = shrunk.all_gather_object(&group.rank())?;
    if (&ranks[..], shrunk.global_ranks()) == (&left[..], &global[..]) {
        return Ok(());
    }
    Err(format!("{left:?} should be left of {:?}, not {ranks:?}", group.global_ranks()).into())
}

/// A call that all ranks but the culprit make, in one form or another.
fn expected(group: &Group, random: &mut Random) -> Result<(), CommError> {
    let mut buf = vec![1.0_f32; 1000];
    match random.below(3) {
        0 => group.all_reduce(&mut buf, ReduceOp::Sum),
        1 => group.start(op::all_reduce(buf, ReduceOp::Sum))?.wait().map(drop),
        _ => group.scope(|scope| scope.start(op::all_reduce(&mut buf[..], ReduceOp::Sum)).map(drop)),
    }
}

/// A call that the culprit makes instead.
fn other(group: &Group, random: &mut Random) -> Result<(), CommError> {
    let size = group.size();
    match random.below(8) {
        0 => group.barrier(),
        1 => group.all_reduce(&mut vec![1.0_f32; 1000], ReduceOp::Max),
        2 => group.all_reduce(&mut vec![1_i32; 1000], ReduceOp::Sum),
        3 => group.all_reduce(&mut vec![1.0_f32; 300_000], ReduceOp::Sum),
        4 => group.start(op::broadcast(vec![1.0_f32; 1000], random.below(size)))?.wait().map(drop),
        5 => group.start(op::all_gather(vec![1.0_f32; 1000], vec![0.0; 1000 * size]))?.wait().map(drop),
        6 => group.start(op::scan(vec![1.0_f32; 1000], ReduceOp::Sum))?.wait().map(drop),
        _ => group.gather(&[1.0_f32; 1000], &mut vec![0.0; 1000 * size], random.below(size)),
    }
}

/// The cause that an error names, if it is the expected one.
fn cause(error: &CommError, culprit: usize, fault: Fault) -> Result<String, TestError> {
    let right = match (fault, error) {
        (Fault::MismatchedCall, CommError::Mismatch { rank, by, .. }) => *rank == culprit || *by == culprit,
        (Fault::Abort, CommError::Aborted { by, reason, .. }) => *by == culprit && reason == REASON,
        (Fault::Leave | Fault::Destroy, CommError::PeerLost { rank, how: LossReason::Left, .. }) => {
            *rank == culprit
        }
        _ => false,
    };
    let text = error.to_string();
    // The rest of the text tells where this rank was.
    let cause = text.split("; group").next().unwrap_or_default().to_owned();
    if right { Ok(cause) } else { Err(format!("{fault:?} by rank {culprit} became: {text}").into()) }
}
