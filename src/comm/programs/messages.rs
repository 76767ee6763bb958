//! Messages between the ranks of a group.

use std::sync::{Arc, Mutex};

use crate::{CommError, Group};

use super::calls::Keeper;
use super::model::junk;
use super::program::{Message, Messages, Pattern};
use super::values::{Value, hash};
use super::works::{Shelves, Stop};
use convoke_testkit::Random;

impl Messages {
    /// The content of the message at this place in the list.
    pub(crate) fn content<T: Value>(&self, index: usize) -> Vec<T> {
        (0..self.list[index].len).map(|place| T::exact(hash(self.seed, index, place))).collect()
    }

    /// The messages that this rank sends or receives, with their places in the list.
    pub(crate) fn of(&self, me: usize) -> impl Iterator<Item = (usize, &Message)> {
        self.list.iter().enumerate().filter(move |(_, message)| message.from == me || message.to == me)
    }

    pub(crate) fn check<T: Value>(&self, index: usize, got: &[T]) -> Result<(), String> {
        let want = self.content::<T>(index);
        let same = got.len() == want.len() && got.iter().zip(&want).all(|(got, want)| got.is(*want));
        if same { Ok(()) } else { Err(format!("{:?} has not arrived as it was sent", self.list[index])) }
    }

    /// The place of the message that `from` sends, if there is one that was not received before.
    fn first_of(&self, from: usize, seen: &mut Vec<usize>) -> Result<usize, String> {
        let index = self.list.iter().position(|message| message.from == from);
        let index = index.filter(|index| !seen.contains(index));
        let index = index.ok_or_else(|| format!("a message from rank {from}, which has sent none or one"))?;
        seen.push(index);
        Ok(index)
    }
}

/// Sends and receives this rank's messages, and waits for them.
pub(crate) fn exchange<T: Value>(group: &Group, what: &Messages, random: &mut Random) -> Result<(), Stop> {
    let me = group.rank();
    match what.pattern {
        Pattern::Plain => one_after_the_other::<T>(group, what),
        Pattern::SendRecv => {
            let index = |is_mine: fn(&Message, usize) -> bool| {
                what.list.iter().position(|message| is_mine(message, me)).expect("one for each rank")
            };
            let (out, into) =
                (index(|message, me| message.from == me), index(|message, me| message.to == me));
            let (to, from) = (&what.list[out], &what.list[into]);
            let mut got = junk::<T>(from.len);
            let send = what.content::<T>(out);
            group.send_recv((&send, to.to, to.tag), (&mut got, from.from, from.tag))?;
            Ok(what.check(into, &got)?)
        }
        Pattern::Batch => side_by_side::<T>(group, what),
        Pattern::AnySource => {
            let (senders, mut seen) = (what.list.iter().filter(|message| message.to == me), Vec::new());
            for Message { tag, len, .. } in senders {
                let mut got = junk::<T>(*len);
                let from = group.recv_any(&mut got, *tag)?;
                what.check(what.first_of(from, &mut seen)?, &got)?;
            }
            for (index, Message { to, tag, .. }) in what.of(me).filter(|(_, message)| message.from == me) {
                group.send(&what.content::<T>(index), *to, *tag)?;
            }
            Ok(())
        }
        Pattern::Probe => {
            if let Some((index, Message { from, tag, len, .. })) =
                what.of(me).find(|(_, message)| message.to == me)
            {
                let named = Some(*from).filter(|_| random.below(2) == 0);
                let envelope = match random.below(2) {
                    0 => group.probe(named, *tag)?,
                    _ => loop {
                        if let Some(envelope) = group.try_probe(named, *tag)? {
                            break envelope;
                        }
                        std::thread::yield_now();
                    },
                };
                if (envelope.from(), envelope.count(), envelope.dtype()) != (*from, *len, T::DTYPE) {
                    return Err(format!("{envelope:?} for {:?}", what.list[index]).into());
                }
            }
            one_after_the_other::<T>(group, what)
        }
    }
}

fn one_after_the_other<T: Value>(group: &Group, what: &Messages) -> Result<(), Stop> {
    for (index, Message { from, to, tag, len }) in what.of(group.rank()) {
        if *from == group.rank() {
            group.send(&what.content::<T>(index), *to, *tag)?;
        } else {
            let mut got = junk::<T>(*len);
            group.recv(&mut got, *from, *tag)?;
            what.check(index, &got)?;
        }
    }
    Ok(())
}

fn side_by_side<T: Value>(group: &Group, what: &Messages) -> Result<(), Stop> {
    let me = group.rank();
    let memory = |(index, message): (usize, &Message)| {
        if message.from == me { what.content::<T>(index) } else { junk(message.len) }
    };
    let mut memory: Vec<Vec<T>> = what.of(me).map(memory).collect();
    let mut batch = group.batch();
    for ((_, Message { from, to, tag, .. }), memory) in what.of(me).zip(&mut memory) {
        if *from == me {
            batch.send(memory, *to, *tag)?;
        } else {
            batch.recv(memory, *from, *tag)?;
        }
    }
    batch.wait()?;
    what.of(me).zip(&memory).try_for_each(|((index, _), got)| Ok(what.check(index, got)?))
}

/// Begins to send and to receive this rank's messages.
pub(crate) fn begin<T: Value>(
    group: &Group,
    what: &Arc<Messages>,
    shelves: &mut Shelves,
) -> Result<(), CommError> {
    let (me, own) = (group.rank(), group.nonblocking());
    let seen = Arc::new(Mutex::new(Vec::new()));
    for (index, Message { from, to, tag, len }) in what.of(me) {
        let all = Arc::clone(what);
        if *from == me {
            let work = group.isend(what.content::<T>(index), *to, *tag)?;
            shelves.keep(work, Box::new(move |sent| all.check(index, &sent)));
        } else if what.pattern == Pattern::AnySource {
            let seen = Arc::clone(&seen);
            let work = own.recv_any(junk::<T>(*len), *tag)?;
            let look = move |(got, from): (Vec<T>, usize)| {
                let index = all.first_of(from, &mut seen.lock().expect("nobody panics with it"))?;
                all.check(index, &got)
            };
            shelves.keep_receive(work, Box::new(look));
        } else {
            let work = group.irecv(junk::<T>(*len), *from, *tag)?;
            shelves.keep_receive(work, Box::new(move |got| all.check(index, &got)));
        }
    }
    Ok(())
}
