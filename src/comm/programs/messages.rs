//! Messages between the ranks of a group.

use std::sync::{Arc, Mutex};

use crate::{CommError, Group, Status, op};

use super::calls::HandleSink;
use super::handles::{PendingHandles, TestError};
use super::model::arbitrary;
use super::random_program::{Message, Messages, Pattern};
use super::values::{Value, hash};
use convoke_testkit::Random;

impl Messages {
    /// The content of the message at this place in the list.
    pub(crate) fn content<T: Value>(&self, index: usize) -> Vec<T> {
        (0..self.list[index].len).map(|place| T::exact(hash(self.seed, index, place))).collect()
    }

    /// The messages that this rank sends or receives, with their places in the list.
    pub(crate) fn of_rank(&self, me: usize) -> impl Iterator<Item = (usize, &Message)> {
        self.list.iter().enumerate().filter(move |(_, message)| message.from == me || message.to == me)
    }

    pub(crate) fn check<T: Value>(&self, index: usize, got: &[T]) -> Result<(), String> {
        let want = self.content::<T>(index);
        let same = got.len() == want.len() && got.iter().zip(&want).all(|(got, want)| got.equals(*want));
        if same { Ok(()) } else { Err(format!("{:?} has not arrived as it was sent", self.list[index])) }
    }

    /// The place of the message that `from` sends, if there is one that was not received before.
    fn unseen_from(&self, from: usize, seen: &mut Vec<usize>) -> Result<usize, String> {
        let index = self.list.iter().position(|message| message.from == from);
        let index = index.filter(|index| !seen.contains(index));
        let index = index.ok_or_else(|| format!("a message from rank {from}, which has sent none or one"))?;
        seen.push(index);
        Ok(index)
    }
}

/// Sends and receives this rank's messages, and waits for them.
pub(crate) fn exchange<T: Value>(
    group: &Group,
    what: &Messages,
    random: &mut Random,
) -> Result<(), TestError> {
    let me = group.rank();
    match what.pattern {
        Pattern::Plain => sequential::<T>(group, what),
        Pattern::SendRecv => {
            let index = |is_mine: fn(&Message, usize) -> bool| {
                what.list.iter().position(|message| is_mine(message, me)).expect("one for each rank")
            };
            let (out, into) =
                (index(|message, me| message.from == me), index(|message, me| message.to == me));
            let (to, from) = (&what.list[out], &what.list[into]);
            let mut got = arbitrary::<T>(from.len);
            let send = what.content::<T>(out);
            group.run((op::send(&send, to.to).tag(to.tag), op::recv(&mut got, from.from).tag(from.tag)))?;
            Ok(what.check(into, &got)?)
        }
        Pattern::Batch => batched::<T>(group, what),
        Pattern::AnySource => {
            let (senders, mut seen) = (what.list.iter().filter(|message| message.to == me), Vec::new());
            for Message { tag, len, .. } in senders {
                let mut got = arbitrary::<T>(*len);
                let from = group.recv_any(&mut got, *tag)?.source();
                what.check(what.unseen_from(from, &mut seen)?, &got)?;
            }
            for (index, Message { to, tag, .. }) in what.of_rank(me).filter(|(_, message)| message.from == me)
            {
                group.send(&what.content::<T>(index), *to, *tag)?;
            }
            Ok(())
        }
        Pattern::Probe => {
            if let Some((index, Message { from, tag, len, .. })) =
                what.of_rank(me).find(|(_, message)| message.to == me)
            {
                let named = Some(*from).filter(|_| random.below(2) == 0);
                let status = match random.below(2) {
                    0 => group.probe(named, *tag)?,
                    _ => loop {
                        if let Some(status) = group.try_probe(named, *tag)? {
                            break status;
                        }
                        std::thread::yield_now();
                    },
                };
                if (status.source(), status.count(), status.dtype()) != (*from, *len, T::DTYPE) {
                    return Err(format!("{status:?} for {:?}", what.list[index]).into());
                }
            }
            sequential::<T>(group, what)
        }
    }
}

fn sequential<T: Value>(group: &Group, what: &Messages) -> Result<(), TestError> {
    for (index, Message { from, to, tag, len }) in what.of_rank(group.rank()) {
        if *from == group.rank() {
            group.send(&what.content::<T>(index), *to, *tag)?;
        } else {
            let mut got = arbitrary::<T>(*len);
            group.recv(&mut got, *from, *tag)?;
            what.check(index, &got)?;
        }
    }
    Ok(())
}

fn batched<T: Value>(group: &Group, what: &Messages) -> Result<(), TestError> {
    let me = group.rank();
    let memory = |(index, message): (usize, &Message)| {
        if message.from == me { what.content::<T>(index) } else { arbitrary(message.len) }
    };
    let mut memory: Vec<Vec<T>> = what.of_rank(me).map(memory).collect();
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for ((_, Message { from, to, tag, .. }), memory) in what.of_rank(me).zip(&mut memory) {
        if *from == me {
            sends.push(op::send(memory, *to).tag(*tag));
        } else {
            recvs.push(op::recv(memory, *from).tag(*tag));
        }
    }
    group.run((sends, recvs))?;
    what.of_rank(me).zip(&memory).try_for_each(|((index, _), got)| Ok(what.check(index, got)?))
}

/// Begins to send and to receive this rank's messages.
pub(crate) fn begin<T: Value>(
    group: &Group,
    what: &Arc<Messages>,
    handles: &mut PendingHandles,
) -> Result<(), CommError> {
    let me = group.rank();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for (index, Message { from, to, tag, len }) in what.of_rank(me) {
        let all = Arc::clone(what);
        if *from == me {
            let work = group.start(op::send(what.content::<T>(index), *to).tag(*tag))?;
            handles.add_handle(work, Box::new(move |sent| all.check(index, &sent)));
        } else if what.pattern == Pattern::AnySource {
            let seen = Arc::clone(&seen);
            let work = group.start(op::recv_any(arbitrary::<T>(*len)).tag(*tag))?;
            let check = move |(got, status): (Vec<T>, Status)| {
                let index =
                    all.unseen_from(status.source(), &mut seen.lock().expect("nobody panics with it"))?;
                all.check(index, &got)
            };
            handles.add_receive(work, Box::new(check));
        } else {
            let work = group.start(op::recv(arbitrary::<T>(*len), *from).tag(*tag))?;
            handles.add_receive(work, Box::new(move |(got, _)| all.check(index, &got)));
        }
    }
    Ok(())
}
